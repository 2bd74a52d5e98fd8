"""The operations of a step as data (``kinds``, ``schedule``), and the choice of the fastest setting
(``setting_choice``)."""
