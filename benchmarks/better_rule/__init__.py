"""Which rule explains best, on which architecture: candidates, the choice on validation bags, the report."""
