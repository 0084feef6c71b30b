"""What travels, counted by hand."""

from steelyard.recommend.communication import Traffic, row_bytes


def test_a_row_is_its_items_number_its_factors_and_its_bias():
    assert row_bytes(20) == 4 + 4 * 20 + 4
    assert row_bytes(1) == 12


def test_rows_go_down_without_numbers_and_up_with_them():
    """20 factors: 84 bytes a row down (the table is whole and in order), 88 bytes up (the item's number beside it)."""
    first = Traffic().plus(down=3 * 100, up=7, width=row_bytes(20))
    assert first == Traffic(down_vectors=300, up_vectors=7, down_bytes=300 * 84, up_bytes=7 * 88)
    second = first.plus(down=100, up=2, width=row_bytes(20))
    assert second == Traffic(down_vectors=400, up_vectors=9, down_bytes=400 * 84, up_bytes=9 * 88)
    assert second.vectors == 409
    assert second.numbers() == (400, 9, 33_600, 792)
    assert Traffic(*second.numbers()) == second
    assert str(second) == "409 vectors (400 down, 9 up), 34,392 bytes"
