"""Checks of a run's samples, of rules that must hold in every step, and of learning.

Workers compute counts and differences (`batches`, `gap`). The controller finds problems in these numbers
(`trust`, `integrity`, `learning`). A `Watch` object stores the numbers of earlier steps.
"""
