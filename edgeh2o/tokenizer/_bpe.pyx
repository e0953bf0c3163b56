# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Joins characters into the tokens of a BPE vocabulary, the pair that comes first in the merges first.

Among equals the leftmost goes first. A heap over a linked list of symbols makes that O(n log n) for
any text. The library ``tokenizers`` gives the same ids but takes several times as long to get ready,
a fifth of the time from the start of the program to the first token of a small model.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy
from libcpp.algorithm cimport pop_heap, push_heap
from libcpp.pair cimport pair
from libcpp.vector cimport vector

from ._text cimport HASH_MULTIPLIER, character_length, hash_text

import os

# Words that are remembered with their ids, and the length in bytes up to which they are.
cdef int MAX_CACHED_WORDS = 1 << 14
cdef int MAX_CACHED_BYTES = 64

# Rank and place of the left half, such that the least is the top of the heap; the id they make.
ctypedef pair[uint64_t, int32_t] Candidate


cdef struct Merge:
    uint64_t halves  # ids of the left and the right one
    uint32_t rank
    int32_t token_id  # -1 in an empty slot


cdef struct Symbol:
    int32_t token_id  # -1 for a character without a token
    int32_t previous
    int32_t next
    bint is_taken  # by the symbol to its left


cdef Py_ssize_t count_stored(bytes strings) except -1:
    """How many strings there are, each after its length. Raises ValueError unless all are whole."""
    cdef const char* data = PyBytes_AS_STRING(strings)
    cdef Py_ssize_t left = PyBytes_GET_SIZE(strings)
    cdef Py_ssize_t count = 0
    cdef uint64_t length = 0
    while left > 0:
        if left >= 8:
            memcpy(&length, data, 8)
        if left < 8 or length > <uint64_t>(left - 8):
            raise ValueError("the merges are cut off")
        data += 8 + length
        left -= 8 + <Py_ssize_t>length
        count += 1
    return count


cdef Py_ssize_t skip_blanks(const char* data, Py_ssize_t at, Py_ssize_t end) noexcept nogil:
    while at < end and (data[at] == 32 or data[at] == 10 or data[at] == 13 or data[at] == 9):
        at += 1
    return at


cdef Py_ssize_t copy_json_text(
    const char* data, Py_ssize_t at, Py_ssize_t end, vector[char]& out, bint has_blanks
) noexcept nogil:
    """Appends a string of JSON; the place behind it, -1 for escapes other than of \\ and quotes."""
    cdef char byte
    if at >= end or data[at] != 34:
        return -1
    at += 1
    while at < end:
        byte = data[at]
        at += 1
        if byte == 34:
            return at
        if byte == 92:
            if at >= end or (data[at] != 34 and data[at] != 92 and data[at] != 47):
                return -1
            byte = data[at]
            at += 1
        elif <unsigned char>byte < 32 or (byte == 32 and not has_blanks):
            return -1
        out.push_back(byte)
    return -1


def cut_json_merges(bytes text):
    """The merges of the array of JSON with which ``text`` begins, and the bytes that it takes.

    They are as ``PairMerger`` takes them in bytes. Strings with a blank between the halves, or pairs
    of strings without blanks; None for anything else, damage and escapes of code points among it.
    """
    cdef const char* data = PyBytes_AS_STRING(text)
    cdef Py_ssize_t end = PyBytes_GET_SIZE(text)
    cdef Py_ssize_t at = skip_blanks(data, 0, end)
    cdef vector[char] out
    cdef size_t start
    cdef uint64_t length
    cdef bint are_pairs
    cdef char delimiter
    if at >= end or data[at] != 91:
        return None
    at = skip_blanks(data, at + 1, end)
    are_pairs = at < end and data[at] == 91
    out.reserve(end)
    while True:
        start = out.size()
        out.resize(start + 8)
        if are_pairs:
            if at >= end or data[at] != 91:
                return None
            for delimiter in (44, 93):
                if delimiter == 93:
                    out.push_back(32)
                at = copy_json_text(data, skip_blanks(data, at + 1, end), end, out, False)
                if at < 0:
                    return None
                at = skip_blanks(data, at, end)
                if at >= end or data[at] != delimiter:
                    return None
            at += 1
        else:
            at = copy_json_text(data, at, end, out, True)
            if at < 0:
                return None
        length = out.size() - start - 8
        memcpy(out.data() + start, &length, 8)
        at = skip_blanks(data, at, end)
        if at >= end or (data[at] != 44 and data[at] != 93):
            return None
        if data[at] == 93:
            return PyBytes_FromStringAndSize(out.data(), out.size()), at + 1
        at = skip_blanks(data, at + 1, end)


cdef class PairMerger:
    """A vocabulary made ready for encoding.

    ``tokens`` are the texts in the order of their ids, no two alike; ``merges`` are pairs of them with
    a space between, in bytes if they are as in a GGUF file: a length of 64 bits and UTF-8 each.
    ``ignore_merges`` takes words of the vocabulary as they are. Raises ValueError
    for merges that are no pairs of known texts, that make an unknown one or that repeat.
    """

    cdef vector[char] text
    cdef vector[Py_ssize_t] starts  # of the tokens in text, and its end
    cdef vector[int32_t] table
    cdef vector[Merge] merges
    cdef vector[char] joined  # of the merge at hand
    cdef vector[Symbol] symbols
    cdef vector[Candidate] heap
    cdef uint64_t seed
    cdef uint32_t n_merges
    cdef bint ignore_merges
    cdef dict cache

    def __init__(self, tokens, merges, *, bint ignore_merges=False):
        cdef Merge empty
        cdef Py_ssize_t size = 16
        cdef Py_ssize_t n_bytes
        cdef const char* data
        # Seeded, so that no file can be made of texts that all fall into one slot.
        self.seed = int.from_bytes(os.urandom(8), "little")
        self.ignore_merges = ignore_merges
        self.cache = {}
        while size < 2 * len(tokens):
            size *= 2
        self.table.assign(size, -1)
        self.starts.reserve(len(tokens) + 1)
        self.starts.push_back(0)
        for token in tokens:
            self.add_token(token)
        n_merges = count_stored(merges) if isinstance(merges, bytes) else len(merges)
        size = 16
        while size < 2 * n_merges:
            size *= 2
        empty.halves = 0
        empty.rank = 0
        empty.token_id = -1
        self.merges.assign(size, empty)
        if isinstance(merges, bytes):
            self.add_stored_merges(merges)
            return
        for merge in merges:
            data = PyUnicode_AsUTF8AndSize(merge, &n_bytes)
            self.add_merge(data, n_bytes)

    def encode(self, words):
        """The ids of ``words``, one after the other; characters without a token vanish."""
        cdef list joined = []
        for word in words:
            known = self.cache.get(word)
            if known is None:
                known = self.encode_word(word)
            joined += known
        return joined

    cdef list encode_word(self, str word):
        cdef Py_ssize_t size
        cdef const char* data = PyUnicode_AsUTF8AndSize(word, &size)
        cdef vector[int32_t] found
        cdef list ids
        cdef int32_t whole = self.find(data, size) if self.ignore_merges else -1
        if whole >= 0:
            return [whole]
        if size > 0x7FFFFFFF:
            raise OverflowError("at most 2 GiB of text can be encoded at once")
        self.split(data, size)
        self.merge_symbols(found)
        ids = found
        if size <= MAX_CACHED_BYTES:
            if len(self.cache) >= MAX_CACHED_WORDS:
                self.cache.clear()
            self.cache[word] = ids
        return ids

    cdef int add_token(self, str token) except -1:
        cdef Py_ssize_t size
        cdef const char* data = PyUnicode_AsUTF8AndSize(token, &size)
        cdef uint64_t slot = hash_text(data, size, self.seed) & (self.table.size() - 1)
        while self.table[slot] >= 0:
            slot = (slot + 1) & (self.table.size() - 1)
        self.table[slot] = <int32_t>(self.starts.size() - 1)
        self.text.insert(self.text.end(), data, data + size)
        self.starts.push_back(<Py_ssize_t>self.text.size())
        return 0

    cdef int add_stored_merges(self, bytes merges) except -1:
        cdef const char* data = PyBytes_AS_STRING(merges)
        cdef const char* end = data + PyBytes_GET_SIZE(merges)
        cdef uint64_t length
        while data < end:  # count_stored has checked the lengths
            memcpy(&length, data, 8)
            self.add_merge(data + 8, <Py_ssize_t>length)
            data += 8 + length
        return 0

    cdef int add_merge(self, const char* data, Py_ssize_t size) except -1:
        cdef const char* space = <const char*>memchr(data, 32, size)
        cdef Py_ssize_t n_left = space - data if space != NULL else size
        cdef int32_t left, right, whole
        cdef Merge* slot
        if n_left == size or memchr(space + 1, 32, size - n_left - 1) != NULL:
            raise ValueError(f"{data[:size][:80]!r} is no pair")
        self.joined.assign(data, data + n_left)
        self.joined.insert(self.joined.end(), space + 1, data + size)
        left = self.find(data, n_left)
        right = self.find(space + 1, size - n_left - 1)
        whole = self.find(self.joined.data(), self.joined.size())
        if left < 0 or right < 0 or whole < 0:
            raise ValueError(f"{data[:size][:80]!r} is no pair of known texts that make another one")
        slot = self.find_merge(left, right)
        if slot.token_id >= 0:
            raise ValueError(f"{data[:size][:80]!r} repeats")
        slot.halves = <uint64_t>left << 32 | <uint64_t>right
        slot.rank = self.n_merges
        slot.token_id = whole
        self.n_merges += 1
        return 0

    cdef inline int32_t find(self, const char* text, Py_ssize_t length) noexcept nogil:
        """The id of a text, -1 if it is no token."""
        cdef uint64_t slot = hash_text(text, length, self.seed) & (self.table.size() - 1)
        cdef int32_t token_id
        cdef Py_ssize_t start
        while True:
            token_id = self.table[slot]
            if token_id < 0:
                return -1
            start = self.starts[token_id]
            if self.starts[token_id + 1] - start == length and (
                memcmp(self.text.data() + start, text, length) == 0
            ):
                return token_id
            slot = (slot + 1) & (self.table.size() - 1)

    cdef inline Merge* find_merge(self, int32_t left, int32_t right) noexcept nogil:
        """The merge of two tokens, or the empty slot where it would be."""
        cdef uint64_t ids = <uint64_t>left << 32 | <uint64_t>right
        cdef uint64_t slot = (ids ^ self.seed) * HASH_MULTIPLIER
        slot = ((slot ^ slot >> 32) * HASH_MULTIPLIER >> 40) & (self.merges.size() - 1)
        while self.merges[slot].token_id >= 0 and self.merges[slot].halves != ids:
            slot = (slot + 1) & (self.merges.size() - 1)
        return &self.merges[slot]

    cdef void split(self, const char* data, Py_ssize_t size) noexcept nogil:
        """Makes symbols of the characters of a word."""
        cdef Py_ssize_t position = 0
        cdef Py_ssize_t length
        cdef int32_t at
        cdef Symbol symbol
        self.symbols.clear()
        while position < size:
            length = min(character_length(data[position]), size - position)
            at = <int32_t>self.symbols.size()
            symbol.token_id = self.find(data + position, length)
            symbol.previous = at - 1
            symbol.next = at + 1
            symbol.is_taken = False
            self.symbols.push_back(symbol)
            position += length
        if not self.symbols.empty():
            self.symbols.back().next = -1

    cdef inline void push(self, int32_t left, int32_t right) noexcept nogil:
        """Notes that two neighbours can merge, if they can."""
        cdef Merge* merge
        if left < 0 or right < 0:
            return
        if self.symbols[left].token_id < 0 or self.symbols[right].token_id < 0:
            return
        merge = self.find_merge(self.symbols[left].token_id, self.symbols[right].token_id)
        if merge.token_id >= 0:
            self.heap.push_back(
                Candidate(~(<uint64_t>merge.rank << 32 | <uint64_t>left), merge.token_id)
            )
            push_heap(self.heap.begin(), self.heap.end())

    cdef void merge_symbols(self, vector[int32_t]& ids) noexcept nogil:
        """Merges all symbols and appends the ids that are left."""
        cdef int32_t at, left, right
        cdef Symbol* kept
        cdef Candidate best
        for at in range(1, <int32_t>self.symbols.size()):
            self.push(at - 1, at)
        while not self.heap.empty():
            pop_heap(self.heap.begin(), self.heap.end())
            best = self.heap.back()
            self.heap.pop_back()
            left = <int32_t>(~best.first & 0xFFFFFFFFu)
            kept = &self.symbols[left]
            right = kept.next
            # The pair is no more if one of its halves has grown.
            if kept.is_taken or right < 0 or self.symbols[right].token_id < 0:
                continue
            if self.find_merge(kept.token_id, self.symbols[right].token_id).token_id != best.second:
                continue
            kept.token_id = best.second
            kept.next = self.symbols[right].next
            self.symbols[right].is_taken = True
            if kept.next >= 0:
                self.symbols[kept.next].previous = left
            self.push(kept.previous, left)
            self.push(left, kept.next)
        at = -1 if self.symbols.empty() else 0
        while at >= 0:
            if self.symbols[at].token_id >= 0:
                ids.push_back(self.symbols[at].token_id)
            at = self.symbols[at].next
