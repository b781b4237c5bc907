"""What the preferences are about: the number of stars. Training does not see it; it is measured beside the
score of the reward model."""


def stars(prompt, response):
    return response.count("*")
