"""How a conversion is carried out: copying, journal, manifest, comparison, ranks, reports."""
