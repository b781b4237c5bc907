"""Checks that a run makes of itself: of its samples, of rules that must hold, and of its learning.

Workers count (`batches`, `gap`); the controller decides (`trust`, `integrity`, `learning`). One object,
`Watch`, remembers the earlier steps.
"""
