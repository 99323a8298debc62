"""Which method a model should be explained with, and whether a map can be believed: the study's nets and figures."""
