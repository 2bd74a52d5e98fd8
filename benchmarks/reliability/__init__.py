"""Reliability of training under faults and over time. Each module asks one question.

A question is a function that takes a folder and yields what it tried, one outcome at a time. It
keeps each outcome in a file of that folder as it comes, so a run that was cut off goes on there.
"""
