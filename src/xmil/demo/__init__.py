"""The demonstration: slides of handwritten digits, with evidence that anyone can check."""
