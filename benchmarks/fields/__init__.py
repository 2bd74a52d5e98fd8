"""A model of many fields on mixed tables, where each table does little and overhead does much.

One idea per file, each using those above it: ``question`` the settings, ``workload`` what a model
has to tell, ``model`` tables and over-arch, ``generated`` fields that a seed draws as a workload,
``columns`` those of a log, ``sequences`` a DIN-like model of clicks, ``zoo`` a configuration's
model, ``plans`` where tables go, ``variants`` plans under pipelines, ``trainer`` one variant's
model in a pipeline, ``compare`` the work of every rank, ``report`` the table and the file. Turns,
clocks and arithmetic are those of :mod:`benchmarks.pipelines`.
"""
