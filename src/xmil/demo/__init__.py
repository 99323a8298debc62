"""The demonstration: slides of handwritten digits, whose true evidence anyone can see."""
