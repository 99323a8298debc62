"""Studies: the evidence benchmark on bags of digits, its tables and plots."""
