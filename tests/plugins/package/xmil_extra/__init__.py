"""A package from outside: one file for each kind of addition, found through entry points alone."""
