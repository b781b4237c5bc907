"""What the preferences are about: the number of stars. Training does not see it; it is measured beside what the
reward model says."""


def stars(prompt, response):
    return response.count("*")
