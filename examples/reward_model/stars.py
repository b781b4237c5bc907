"""Count the stars in a response, which is what the preferences are about.

Training does not use this number (its weight is 0); it is logged beside the score of the reward model.
"""


def stars(prompt, response):
    return response.count("*")
