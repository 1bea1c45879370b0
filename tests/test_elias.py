"""Whole numbers as bits: Elias' gamma code, and codes of fixed width."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedonebit.apps.train.elias import decode_fixed, decode_gamma, encode_fixed, encode_gamma, pack_bits, unpack_bits


@given(st.lists(st.integers(1, 2**53 - 1), max_size=60))
def test_gamma_codes_give_the_numbers_back(numbers):
    given_ = torch.tensor(numbers, dtype=torch.int64)
    assert decode_gamma(encode_gamma(given_), len(numbers)).tolist() == numbers


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3000))
def test_gamma_codes_of_many_small_numbers_give_them_back(numbers):
    packed = encode_gamma(torch.tensor(numbers))
    assert decode_gamma(packed, len(numbers)).tolist() == numbers
    assert len(packed) == math.ceil(sum(2 * n.bit_length() - 1 for n in numbers) / 8)


@given(st.integers(1, 2**40))
def test_a_gamma_code_is_as_elias_defined_it(number):
    """As many zeros as the number has binary digits behind its first, then those digits, the first one first."""
    digits = f"{number:b}"
    code = "0" * (len(digits) - 1) + digits
    bits = unpack_bits(encode_gamma(torch.tensor([number]))).tolist()
    assert "".join(str(int(bit)) for bit in bits[: len(code)]) == code
    assert not any(bits[len(code) :])
    assert len(bits) - len(code) < 8


@given(st.integers(1, 12), st.data())
def test_fixed_codes_give_the_numbers_back(width, data):
    numbers = data.draw(st.lists(st.integers(0, 2**width - 1), max_size=100))
    packed = encode_fixed(torch.tensor(numbers, dtype=torch.int64), width)
    assert decode_fixed(packed, width, len(numbers)).tolist() == numbers
    assert len(packed) == width * math.ceil(len(numbers) / 8)


@given(st.lists(st.booleans(), max_size=200))
def test_packed_bits_are_least_significant_first(bits):
    packed = pack_bits(torch.tensor(bits, dtype=torch.bool))
    assert packed.tolist() == np.packbits(np.array(bits, dtype=bool), bitorder="little").tolist()
    assert unpack_bits(packed)[: len(bits)].tolist() == bits
