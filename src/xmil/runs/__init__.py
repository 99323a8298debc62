"""Verbs over slides: explain, predict, evaluate, tile, embed, draw, each a step that `execute` works on."""
