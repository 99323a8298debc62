"""What a model looks at over a cohort: concepts, strategies, shortcuts, stability, biomarkers."""
