"""The open benchmark: suites of tasks with known answers, entries of methods and models, one referee."""
