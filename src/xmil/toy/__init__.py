"""The evidence benchmark: bags of digits whose evidence is known, tables and plots."""
