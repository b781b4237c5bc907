"""What a run notices of itself: checks of its samples, of its rules and of its learning, with one memory.
Workers count (`batches`, `gap`); the controller judges (`trust`, `integrity`, `learning`)."""
