# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""SentencePiece's unigram model: what texts are rewritten to, and the best pieces of them.

Rewriting is by a table of texts and their replacements ("precompiled charsmap"), which is a double
array by XOR: from a state ``s`` the byte ``c`` leads to the unit ``s ^ c``, if that unit has ``c``
for its label (Kanda, Morita, Fuketa: Compressed double-array tries, 2017; darts-clone). Pieces are
a trie whose nodes have their children side by side; the best sum of scores is found from the left
to the right (Viterbi). Both take time that is linear in the text.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from libc.float cimport DBL_MAX
from libc.stdint cimport int32_t, uint8_t, uint32_t
from libc.string cimport memcpy, strlen
from libcpp.algorithm cimport reverse
from libcpp.vector cimport vector

from ._text cimport character_length

# Of a unit: its label with the mark of a replacement, whether a replacement follows, which one.
cdef uint32_t LABEL = 0x800000FF
cdef uint32_t HAS_REPLACEMENT = 0x100
cdef uint32_t NUMBER = 0x7FFFFFFF
# Bytes of the longest text that is replaced; those of NFKC have 18 characters at the most. A
# damaged table could lead in circles.
cdef Py_ssize_t MAX_KEY = 256
cdef Py_ssize_t BYTES_PER_CHECK = 1 << 20
cdef bytes BLANK = b"\xe2\x96\x81"


cdef inline uint32_t offset_of(uint32_t unit) noexcept nogil:
    return (unit >> 10) << ((unit & 0x200) >> 6)


cdef class TextRewriter:
    """Replaces what the table says, and writes blanks as SentencePiece does."""

    cdef vector[uint32_t] units
    cdef bytes replacements
    cdef bint adds_blank
    cdef bint joins_blanks

    def __init__(self, bytes table not None, *, bint adds_blank, bint joins_blanks):
        """``table`` is the charsmap, b"" for none. Raises ValueError that says what is wrong."""
        cdef Py_ssize_t size = PyBytes_GET_SIZE(table)
        cdef uint32_t n_bytes, unit, number
        cdef Py_ssize_t at, state
        cdef const char* data = PyBytes_AS_STRING(table)
        self.adds_blank = adds_blank
        self.joins_blanks = joins_blanks
        self.replacements = b""
        if size == 0:
            return
        n_bytes = int.from_bytes(table[:4], "little")
        if size < 4 or n_bytes % 4 or n_bytes == 0 or 4 + <Py_ssize_t>n_bytes >= size:
            raise ValueError(f"its table of {n_bytes} bytes does not fit into {size}")
        self.units.resize(n_bytes // 4)
        memcpy(self.units.data(), data + 4, n_bytes)
        self.replacements = table[4 + n_bytes :]
        if not self.replacements.endswith(b"\0"):
            raise ValueError("its last replacement does not end")
        try:
            self.replacements.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError("its replacements are not UTF-8") from None
        for at in range(<Py_ssize_t>self.units.size()):
            unit = self.units[at]
            if unit >> 31 or not unit & HAS_REPLACEMENT:
                continue
            state = at ^ offset_of(unit)
            if state >= <Py_ssize_t>self.units.size():
                raise ValueError(f"entry {at} of its table points behind the last one")
            number = self.units[state] & NUMBER
            if number >= <uint32_t>PyBytes_GET_SIZE(self.replacements) or (
                self.replacements[number] & 0xC0 == 0x80
            ):
                raise ValueError(f"entry {at} of its table names no replacement")

    def rewrite(self, bytes text not None, *, bint goes_on=False):
        """What the model reads for ``text``, which must be UTF-8.

        Where it ``goes_on`` from other text, no blank goes before its first word.
        """
        cdef const char* data = PyBytes_AS_STRING(text)
        cdef const char* replacement
        cdef Py_ssize_t size = PyBytes_GET_SIZE(text)
        cdef Py_ssize_t at = 0, checked = 0
        cdef Py_ssize_t length, i
        cdef uint32_t number = 0
        cdef const char* replacements = PyBytes_AS_STRING(self.replacements)
        cdef const char* blank = PyBytes_AS_STRING(BLANK)
        cdef vector[char] out
        cdef bint is_in_word = goes_on
        cdef bint has_blank = goes_on or not self.adds_blank
        out.reserve(size + size // 4 + 16)
        while at < size:
            length = self.find(data + at, size - at, &number)
            if length:
                replacement = replacements + number
                at += length
                length = <Py_ssize_t>strlen(replacement)
            else:
                replacement = data + at
                length = min(character_length(data[at]), size - at)
                at += length
            for i in range(length):
                if replacement[i] == b" ":
                    is_in_word = False
                    if not self.joins_blanks:
                        out.insert(out.end(), blank, blank + 3)
                    continue
                if not is_in_word:
                    is_in_word = True
                    if self.joins_blanks or not has_blank:
                        out.insert(out.end(), blank, blank + 3)
                        has_blank = True
                out.push_back(replacement[i])
            if at - checked > BYTES_PER_CHECK:
                checked = at
                PyErr_CheckSignals()
        return PyBytes_FromStringAndSize(out.data(), <Py_ssize_t>out.size())

    cdef inline Py_ssize_t find(
        self, const char* text, Py_ssize_t size, uint32_t* number
    ) noexcept nogil:
        """Bytes of the longest beginning of ``text`` that is replaced, 0 for none."""
        cdef Py_ssize_t n_units = <Py_ssize_t>self.units.size()
        cdef Py_ssize_t longest = 0, i = 0
        cdef Py_ssize_t state, at
        cdef uint8_t byte
        cdef uint32_t unit
        if n_units == 0:
            return 0
        size = min(size, MAX_KEY)
        state = offset_of(self.units[0])
        while i < size:
            byte = <uint8_t>text[i]
            at = state ^ byte
            if byte == 0 or at >= n_units:
                break
            unit = self.units[at]
            if unit & LABEL != byte:
                break
            i += 1
            state = at ^ offset_of(unit)
            # Whole characters only, whatever the table has.
            if unit & HAS_REPLACEMENT and (i == size or text[i] & 0xC0 != 0x80):
                longest = i
                number[0] = self.units[state] & NUMBER
        return longest


cdef class PieceFinder:
    """The pieces whose scores add up to the most."""

    cdef vector[uint8_t] labels
    cdef vector[int32_t] first_child  # of every node; its children end where the next one's begin
    cdef vector[int32_t] pieces  # that end at a node, -1 for none
    cdef vector[int32_t] ids
    cdef vector[double] scores
    cdef int32_t[256] roots
    cdef int32_t unknown_id
    cdef double unknown_score

    def __init__(self, pieces, ids, scores, int unknown_id, double unknown_score):
        """Of different texts, by UTF-8 bytes, in the order of these bytes; none is empty.

        A character that is no piece is the unknown token, for ``unknown_score``.
        """
        cdef vector[int32_t] starts, first, last
        cdef bytes joined = b"".join(pieces)
        cdef const uint8_t* data = <const uint8_t*>PyBytes_AS_STRING(joined)
        cdef Py_ssize_t node = 0, level_end, i
        cdef int32_t total = 0, depth = 0
        cdef int32_t at, end, child
        cdef uint8_t byte
        if not len(pieces) == len(ids) == len(scores) or len(joined) > 0x7FFFFFFF:
            raise ValueError("an id and a score per piece are needed, and less than 2 GiB of them")
        self.unknown_id = unknown_id
        self.unknown_score = unknown_score
        for i in range(len(pieces)):
            starts.push_back(total)
            total += <int32_t>len(pieces[i])
            self.ids.push_back(ids[i])
            self.scores.push_back(scores[i])
        starts.push_back(total)
        # Level by level: a node is a stretch of pieces that begin alike.
        first.push_back(0)
        last.push_back(<int32_t>len(pieces))
        self.labels.push_back(0)
        level_end = 1
        while node < <Py_ssize_t>first.size():
            if node == level_end:
                depth += 1
                level_end = <Py_ssize_t>first.size()
            self.first_child.push_back(<int32_t>first.size())
            at, end = first[node], last[node]
            if at < end and starts[at + 1] - starts[at] == depth:
                self.pieces.push_back(at)
                at += 1
            else:
                self.pieces.push_back(-1)
            while at < end:
                byte = data[starts[at] + depth]
                first.push_back(at)
                self.labels.push_back(byte)
                while at < end and data[starts[at] + depth] == byte:
                    at += 1
                last.push_back(at)
            node += 1
        self.first_child.push_back(<int32_t>first.size())
        for i in range(256):
            self.roots[i] = -1
        for child in range(self.first_child[0], self.first_child[1]):
            self.roots[self.labels[child]] = child

    def find(self, bytes text not None):
        """The ids of ``text``, which must be UTF-8; neighbours that are unknown are one."""
        cdef const char* data = PyBytes_AS_STRING(text)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(text)
        cdef Py_ssize_t at = 0, checked = 0
        cdef vector[double] totals
        cdef vector[int32_t] steps, lengths
        cdef vector[int32_t] found
        cdef int32_t token_id
        if size > 0x7FFFFFFF:
            raise OverflowError("at most 2 GiB of text can be encoded at once")
        # Of the text up to each byte, and the piece that ends there.
        totals.assign(size + 1, -DBL_MAX)
        steps.resize(size + 1)
        lengths.resize(size + 1)
        totals[0] = 0.0
        while at < size:
            at += self.advance(data, at, size, totals, steps, lengths)
            if at - checked > BYTES_PER_CHECK:
                checked = at
                PyErr_CheckSignals()
        at = size
        while at > 0:
            token_id = self.unknown_id if steps[at] < 0 else self.ids[steps[at]]
            if token_id != self.unknown_id or found.empty() or found.back() != token_id:
                found.push_back(token_id)
            at -= lengths[at]
        reverse(found.begin(), found.end())
        return found

    cdef inline Py_ssize_t advance(
        self,
        const char* data,
        Py_ssize_t at,
        Py_ssize_t size,
        vector[double]& totals,
        vector[int32_t]& steps,
        vector[int32_t]& lengths,
    ) noexcept nogil:
        """Note every piece that begins at a character; its bytes."""
        cdef Py_ssize_t length = min(character_length(data[at]), size - at)
        cdef Py_ssize_t end = at + 1
        cdef int32_t node = self.roots[<uint8_t>data[at]]
        cdef int32_t piece
        cdef double total
        cdef bint is_known = False
        while node >= 0:
            piece = self.pieces[node]
            if piece >= 0:
                is_known = is_known or end - at == length
                total = totals[at] + self.scores[piece]
                if total > totals[end]:
                    totals[end] = total
                    steps[end] = piece
                    lengths[end] = <int32_t>(end - at)
            if end == size:
                break
            node = self.find_child(node, <uint8_t>data[end])
            end += 1
        if not is_known:
            end = at + length
            total = totals[at] + self.unknown_score
            if total > totals[end]:
                totals[end] = total
                steps[end] = -1
                lengths[end] = <int32_t>length
        return length

    cdef inline int32_t find_child(self, int32_t node, uint8_t byte) noexcept nogil:
        cdef int32_t low = self.first_child[node]
        cdef int32_t end = self.first_child[node + 1]
        cdef int32_t high = end
        cdef int32_t middle
        while low < high:
            middle = (low + high) // 2
            if self.labels[middle] < byte:
                low = middle + 1
            else:
                high = middle
        return low if low < end and self.labels[low] == byte else -1
