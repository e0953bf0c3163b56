# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Joins characters into the pieces of a SentencePiece BPE vocabulary, best score first.

Two neighbours merge when their joined text is a piece. The pair whose piece has the highest score
goes first and, among equals, the leftmost: the order of llama.cpp. A heap over a linked list of
symbols makes that O(n log n) for any text.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy
from libcpp.algorithm cimport pop_heap, push_heap
from libcpp.pair cimport pair
from libcpp.vector cimport vector

from ._text cimport HASH_MULTIPLIER, character_length, hash_text

import secrets

import numpy as np

# Pairs of characters are hashed into so many bits; a quarter of a million pairs fill 6 %.
cdef int PAIR_BITS = 22

ctypedef pair[uint64_t, int32_t] Candidate


cdef struct Piece:
    Py_ssize_t start
    int32_t length
    uint32_t rank


cdef struct Symbol:
    const char* text
    int32_t length  # 0 once it is part of the symbol to its left
    int32_t piece  # -1 if the text is no piece
    int32_t previous
    int32_t next


cdef inline uint64_t pair_slot(const char* left, int n_left, const char* right, int n_right) \
        noexcept nogil:
    """The bit of two neighbouring characters; different pairs may share one."""
    cdef uint32_t a = 0
    cdef uint32_t b = 0
    memcpy(&a, left, n_left)
    memcpy(&b, right, n_right)
    return (((<uint64_t>a << 32) | b) * HASH_MULTIPLIER) >> (64 - PAIR_BITS)


cdef class PieceMerger:
    """A vocabulary made ready for encoding.

    ``pieces`` holds the UTF-8 text of each token, empty where no merge may make it; ``scores``
    has one float32 per token; ``byte_ids`` are the 256 ids that stand in for the bytes of what is
    no piece.
    """

    cdef vector[char] text
    cdef vector[Piece] pieces
    cdef vector[int32_t] table
    cdef vector[char] joined
    cdef vector[Symbol] symbols
    cdef vector[Candidate] heap
    cdef int32_t[256] byte_ids
    cdef int32_t longest
    cdef uint64_t seed

    def __init__(self, pieces, scores, byte_ids):
        cdef uint32_t[::1] ranks = order_scores(scores)
        cdef Py_ssize_t size = 16
        cdef Py_ssize_t i
        cdef bytes data
        if len(pieces) != ranks.shape[0] or len(byte_ids) != 256:
            raise ValueError("one score per piece and 256 byte ids are needed")
        while size < 2 * len(pieces):
            size *= 2
        # Seeded, so that no file can be made of pieces that all fall into one slot.
        self.seed = secrets.randbits(64)
        self.table.assign(size, -1)
        self.joined.assign(1 << PAIR_BITS >> 3, 0)
        self.longest = 0
        for i in range(256):
            self.byte_ids[i] = byte_ids[i]
        for i in range(len(pieces)):
            data = pieces[i]
            self.add_piece(<int32_t>i, data, ranks[i])

    def encode(self, bytes text not None):
        """Return the ids of ``text``, which must be valid UTF-8."""
        cdef const char* data = PyBytes_AS_STRING(text)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(text)
        cdef Py_ssize_t position = 0
        cdef Py_ssize_t checked = 0
        cdef Symbol symbol
        cdef Symbol* last
        cdef vector[int32_t] ids
        if size > 0x7FFFFFFF:
            raise OverflowError("at most 2 GiB of text can be encoded at once")
        self.symbols.clear()
        while position < size:
            symbol.text = data + position
            symbol.length = <int32_t>min(character_length(data[position]), size - position)
            if not self.symbols.empty():
                last = &self.symbols.back()
                if not self.may_join(last.text, last.length, symbol.text, symbol.length):
                    self.merge_symbols(ids)
                    if position - checked > 1 << 20:
                        checked = position
                        PyErr_CheckSignals()
            symbol.piece = self.find(symbol.text, symbol.length)
            self.symbols.push_back(symbol)
            position += symbol.length
        self.merge_symbols(ids)
        return ids

    cdef void add_piece(self, int32_t token_id, bytes data, uint32_t rank):
        cdef const char* begin = PyBytes_AS_STRING(data)
        cdef int32_t length = <int32_t>PyBytes_GET_SIZE(data)
        cdef int32_t at = 0
        cdef int n, n_next
        cdef uint64_t slot
        cdef Piece piece
        piece.start = <Py_ssize_t>self.text.size()
        piece.length = length
        piece.rank = rank
        self.pieces.push_back(piece)
        if length == 0:
            return
        self.text.insert(self.text.end(), begin, begin + length)
        self.longest = max(self.longest, length)
        slot = hash_text(begin, length, self.seed) & (self.table.size() - 1)
        while self.table[slot] >= 0:
            slot = (slot + 1) & (self.table.size() - 1)
        self.table[slot] = token_id
        n = character_length(begin[0])
        while at + n < length:
            n_next = character_length(begin[at + n])
            slot = pair_slot(begin + at, n, begin + at + n, n_next)
            self.joined[slot >> 3] |= <char>(1 << (slot & 7))
            at += n
            n = n_next

    cdef inline bint may_join(
        self, const char* left, int n_left, const char* right, int n_right
    ) noexcept nogil:
        """False if no piece holds these two characters side by side: no merge can cross."""
        cdef uint64_t slot = pair_slot(left, n_left, right, n_right)
        return self.joined[slot >> 3] >> (slot & 7) & 1

    cdef inline int32_t find(self, const char* text, int32_t length) noexcept nogil:
        """The id of a text, -1 if it is no piece."""
        cdef uint64_t slot
        cdef int32_t token_id
        cdef Piece* piece
        if length > self.longest:
            return -1
        slot = hash_text(text, length, self.seed) & (self.table.size() - 1)
        while True:
            token_id = self.table[slot]
            if token_id < 0:
                return -1
            piece = &self.pieces[token_id]
            if piece.length == length and memcmp(&self.text[piece.start], text, length) == 0:
                return token_id
            slot = (slot + 1) & (self.table.size() - 1)

    cdef inline void push(self, int32_t left, int32_t right) noexcept nogil:
        """Note that two neighbours can merge, if they can."""
        cdef int32_t length, found
        if left < 0 or right < 0:
            return
        length = self.symbols[left].length + self.symbols[right].length
        found = self.find(self.symbols[left].text, length)
        if found < 0:
            return
        self.heap.push_back(Candidate(
            (<uint64_t>self.pieces[found].rank << 32) | (0xFFFFFFFFu - <uint32_t>left), found
        ))
        push_heap(self.heap.begin(), self.heap.end())

    cdef void merge_symbols(self, vector[int32_t]& ids) noexcept nogil:
        """Merge the run of symbols gathered so far, append its ids and forget it."""
        cdef int32_t count = <int32_t>self.symbols.size()
        cdef int32_t at, left, right, i
        cdef Symbol* kept
        cdef Symbol* taken
        cdef Candidate best
        for at in range(count):
            self.symbols[at].previous = at - 1
            self.symbols[at].next = at + 1 if at + 1 < count else -1
        for at in range(1, count):
            self.push(at - 1, at)
        while not self.heap.empty():
            pop_heap(self.heap.begin(), self.heap.end())
            best = self.heap.back()
            self.heap.pop_back()
            left = <int32_t>(0xFFFFFFFFu - <uint32_t>(best.first & 0xFFFFFFFFu))
            kept = &self.symbols[left]
            right = kept.next
            # A pair that one of its halves has outgrown has another length by now.
            if kept.length == 0 or right < 0:
                continue
            taken = &self.symbols[right]
            if kept.length + taken.length != self.pieces[best.second].length:
                continue
            kept.length += taken.length
            kept.piece = best.second
            kept.next = taken.next
            taken.length = 0
            if kept.next >= 0:
                self.symbols[kept.next].previous = left
            self.push(kept.previous, left)
            self.push(left, kept.next)
        at = 0 if count else -1
        while at >= 0:
            kept = &self.symbols[at]
            if kept.piece >= 0:
                ids.push_back(kept.piece)
            else:
                for i in range(kept.length):
                    ids.push_back(self.byte_ids[<unsigned char>kept.text[i]])
            at = kept.next
        self.symbols.clear()


def order_scores(scores):
    """uint32 that compare as the float32 ``scores`` do; both zeros are equal."""
    bits = (np.ascontiguousarray(scores, dtype=np.float32) + np.float32(0)).view(np.uint32)
    return np.where(bits >> 31 == 1, ~bits, bits | np.uint32(1 << 31)).astype(np.uint32)
