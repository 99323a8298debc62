"""Train models from feature files and a table of labels, on Lightning Fabric."""
