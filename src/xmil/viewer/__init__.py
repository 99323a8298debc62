"""The slide and its evidence in the browser: a read-only server and a page. Looking needs no torch."""
