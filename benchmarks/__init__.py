"""Performance, as ratios within one run: `make bench`. Tests assert no timing; figures in the documentation come from here."""
