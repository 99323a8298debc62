"""Nouns without torch: bags, targets, explanations; errors, registries, durable files, budget, parsing."""
