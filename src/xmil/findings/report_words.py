"""What the report's names mean, in a few words each."""

from __future__ import annotations

from typing import Any

UNTESTED = "not tested: run xmil evaluate and give its folder (--evaluated)"
UNCHECKED = "not tested: give the model (--model)"
UNCORRECTED = "p is not corrected for the number of rows"
LIMITS = (
    "An explanation is about the model, not the disease.",
    "Concepts are directions of the encoder's features; their names are the reader's.",
    "An association is not a cause: a shortcut is a lead to look at, with its slides.",
    "A biomarker from a map is no better than the prediction beside it until it is tested on other data.",
    "For research use only: not a medical device.",
)
BIOMARKERS = {
    "strong_share": "share of patches that clearly support the class: above the cohort's own threshold",
    "supporting_share": "share of patches that score above zero, however little",
    "agreed_share": "share of patches that most models count as support, and none counts against",
    "masked_share": "share of patches whose masked mean over the models is above zero",
    "positive_relevance_share": "support as a share of all score, for and against",
    "hot_regions": "connected groups of supporting patches",
    "largest_region": "patches in the largest of these groups",
    "mixing": "share of neighbouring pairs of which one patch supports and the other opposes",
    "region_strong_share": "strong share within the annotations",
    "region_supporting_share": "supporting share within the annotations",
    "tapas": "share of annotated patches whose masked mean over the models is above zero",
    "plain output": "what the model says without any map: a biomarker has to beat this",
}
STABILITY = {
    "models": "models or runs that were compared",
    "sign agreement": "share of the models on the commoner side of zero; 0.5 is chance, 1 is full agreement",
    "rank correlation": "of the maps of two models, mean over pairs; 0 is chance",
    "kept share": "share of patches that the mask keeps",
    "mean spread": "standard deviation of a patch's score over the models",
    "largest model share": "largest part of all absolute score that one model gives",
}
ACCOUNT = {
    "output": "the explained output",
    "instances": "given to patches: the map",
    "class_token": "reached the class token",
    "bias": "reached added constants",
    "epsilon": "swallowed by stabilisers",
    "other": "unexplained; must be near zero",
    "baseline": "what a bag of baseline patches would get",
    "cut": "stopped at constants that depend on the input",
}
MEASURES = {
    "aupc": "mean output while patches are taken out, the highest first: lower is better",
    "srg": "lowest first less highest first: higher is better, 0 is chance",
    "sufficiency": "mean output while patches are added, the highest first: higher is better",
    "flips": "share of slides whose decision changes while patches are taken out",
    "flipped_at_zero": "share of slides whose decision is gone once all support is out",
}


def short(value: Any) -> str:
    """A number with three digits, anything else as it is."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
