"""Pictures of the landing page."""

import pytest

from docs import cards


@pytest.mark.parametrize("card", cards.CARDS, ids=lambda card: card.__name__)
def test_a_picture_of_the_landing_page_is_what_its_script_draws(card):
    file = cards.FOLDER / f"{card.__name__}.svg"
    assert file.read_text() == cards.drawn(card)
    assert file.stat().st_size < 30_000
