"""Reading processes, which decode patches into memory shared with the encoder."""
