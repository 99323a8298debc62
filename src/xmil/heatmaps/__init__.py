"""Drawing and exporting saved explanations; nothing here imports torch."""
