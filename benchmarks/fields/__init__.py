"""Variants of plans and pipelines on generated fields, columns of a log, sequences, zoo models.

One idea per file, each using those above it: ``question`` the settings, ``workload`` the protocol
of a model and its batches, ``model`` tables and over-arch, ``generated`` fields that a seed draws,
``columns`` those of a log, ``sequences`` a DIN-like model of clicks, ``zoo`` a configuration's
model, ``plans`` where tables go, ``predicted`` their prices, ``variants`` plans under pipelines,
``trainer`` one variant's model in a pipeline, ``compare`` the work of every rank, ``report`` the
table and the file. Turns, clocks and arithmetic are those of :mod:`benchmarks.pipelines`.
"""
