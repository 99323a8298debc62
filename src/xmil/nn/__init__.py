"""Layers that the models are made of: attention pooling, self-attention, Nyström attention, PPEG."""
