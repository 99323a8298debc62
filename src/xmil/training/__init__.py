"""Training: from feature files and a table of labels to models, on Lightning Fabric."""
