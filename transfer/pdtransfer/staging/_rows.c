/* Rows between a pool and a slot in host memory. Scatter writes past the cache: a plain store would first
 * fetch the row that it overwrites. Pack asks for rows ahead of time: they are short and anywhere, so the
 * hardware can not guess them. Optional: copier.py does the same with torch where this was not built. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define LINE 64    /* bytes of a cache line */
#define PART 16    /* bytes of a load or store; rows are whole parts */
#define AHEAD 2048 /* bytes between what is copied and what is asked for */

#if defined(__SSE2__)
#include <emmintrin.h>

#define LOAD_LINE(from)                                                                     \
    const __m128i *f = (const __m128i *)(from);                                             \
    const __m128i a = _mm_loadu_si128(f), b = _mm_loadu_si128(f + 1);                       \
    const __m128i c = _mm_loadu_si128(f + 2), d = _mm_loadu_si128(f + 3);

static void pack_rows(char *slot, const char *pool, size_t row, const int64_t *index, size_t count) {
    const size_t later = row < AHEAD ? AHEAD / row : 1;
    for (size_t i = 0; i < count; i++) {
        const char *from = pool + (size_t)index[i] * row, *end = from + row;
        const char *next = pool + (size_t)index[i + later < count ? i + later : i] * row;
        for (; from + LINE <= end; from += LINE, next += LINE, slot += LINE) {
            _mm_prefetch(next, _MM_HINT_T0);
            LOAD_LINE(from)
            __m128i *to = (__m128i *)slot;
            _mm_storeu_si128(to, a), _mm_storeu_si128(to + 1, b);
            _mm_storeu_si128(to + 2, c), _mm_storeu_si128(to + 3, d);
        }
        for (; from < end; from += PART, slot += PART)
            _mm_storeu_si128((__m128i *)slot, _mm_loadu_si128((const __m128i *)from));
    }
}

static void scatter_rows(char *pool, const char *slot, size_t row, const int64_t *index, size_t count) {
    for (size_t i = 0; i < count; i++) {
        char *to = pool + (size_t)index[i] * row, *end = to + row;
        for (; to < end && (uintptr_t)to % LINE; to += PART, slot += PART) /* a row may start within a line */
            _mm_store_si128((__m128i *)to, _mm_loadu_si128((const __m128i *)slot));
        for (; to + LINE <= end; to += LINE, slot += LINE) {
            LOAD_LINE(slot)
            __m128i *t = (__m128i *)to;
            _mm_stream_si128(t, a), _mm_stream_si128(t + 1, b);
            _mm_stream_si128(t + 2, c), _mm_stream_si128(t + 3, d);
        }
        for (; to < end; to += PART, slot += PART)
            _mm_store_si128((__m128i *)to, _mm_loadu_si128((const __m128i *)slot));
    }
    _mm_sfence(); /* before anyone is told that the bytes are there */
}
#else
static void pack_rows(char *slot, const char *pool, size_t row, const int64_t *index, size_t count) {
    for (size_t i = 0; i < count; i++) memcpy(slot + i * row, pool + (size_t)index[i] * row, row);
}

static void scatter_rows(char *pool, const char *slot, size_t row, const int64_t *index, size_t count) {
    for (size_t i = 0; i < count; i++) memcpy(pool + (size_t)index[i] * row, slot + i * row, row);
}
#endif

static PyObject *copy(PyObject *args, int scatter) {
    unsigned long long pool, rows, row, slot;
    Py_buffer indices;
    if (!PyArg_ParseTuple(args, "KKKy*K", &pool, &rows, &row, &indices, &slot)) return NULL;
    const int64_t *index = indices.buf;
    const size_t count = (size_t)indices.len / sizeof(int64_t);
    if (row == 0 || row % PART || pool % PART) {
        PyBuffer_Release(&indices);
        PyErr_SetString(PyExc_ValueError, "rows are not whole parts of 16 bytes");
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        if (index[i] < 0 || (uint64_t)index[i] >= rows) {
            PyErr_Format(PyExc_IndexError, "row %lld of %llu", (long long)index[i], rows);
            PyBuffer_Release(&indices);
            return NULL;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    if (scatter) scatter_rows((char *)(uintptr_t)pool, (const char *)(uintptr_t)slot, row, index, count);
    else pack_rows((char *)(uintptr_t)slot, (const char *)(uintptr_t)pool, row, index, count);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&indices);
    Py_RETURN_NONE;
}

static PyObject *pack(PyObject *self, PyObject *args) { (void)self; return copy(args, 0); }
static PyObject *scatter(PyObject *self, PyObject *args) { (void)self; return copy(args, 1); }

static PyMethodDef methods[] = {
    {"pack", pack, METH_VARARGS, "pack(pool, rows, row_bytes, indices, slot): addresses and int64 indices"},
    {"scatter", scatter, METH_VARARGS, "scatter(pool, rows, row_bytes, indices, slot)"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_rows", NULL, -1, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__rows(void) { return PyModule_Create(&module); }
