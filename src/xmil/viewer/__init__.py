"""The slide and its evidence in the browser: a read-only server and a page, without torch."""
