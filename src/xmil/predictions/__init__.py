"""How good predictions are: measures with intervals, figures, tables."""
