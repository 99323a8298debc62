"""How good an explanation is: against known evidence, and against the model itself."""
