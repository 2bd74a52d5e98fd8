"""Train pipelines and placements against each other; the command line says what is measured how.

One idea per file, each using those above it: ``question`` the settings, ``variants`` which take
part, ``runner`` one variant on the clock, ``probes`` the best stock ones, ``compare`` what every
rank runs, ``rankings`` its arithmetic, ``floors`` the bounds of a step, ``report`` the table and
the file, ``answer`` from a question to a report.
"""
