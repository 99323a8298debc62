"""Patches read and decoded by processes of their own, into memory that they share with the encoder."""
