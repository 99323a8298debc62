"""The nouns everything else speaks of: bags, targets, explanations, errors, registries. No torch here."""
