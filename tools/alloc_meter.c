/* Counts the bytes of live heap blocks of 16 KiB and more, in all threads, exactly.
 *
 *   cc -O2 -shared -fPIC tools/alloc_meter.c -o build/alloc_meter.so
 *   LD_PRELOAD=build/alloc_meter.so python ...
 *
 * tools/memory.py reads the counters. glibc only: it keeps its allocator reachable under the __libc_ names.
 * Every tensor, oneDNN scratch and gloo buffer comes through here; direct mmap calls do not. The threshold
 * keeps Python's small objects out, so that the counters hold still while no tensor is made.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <unistd.h>

#define SMALLEST_COUNTED 16384

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static atomic_long live_bytes, peak_bytes;

/* A block's usable size does not change while it lives, so what is added once is subtracted once. */
static long counted_size(void *block) {
    long size = block ? (long)malloc_usable_size(block) : 0;
    return size >= SMALLEST_COUNTED ? size : 0;
}

static void raise_peak(long now) {
    long peak = atomic_load(&peak_bytes);
    while (now > peak && !atomic_compare_exchange_weak(&peak_bytes, &peak, now)) {
    }
}

static void add_live(long size) {
    if (size) raise_peak(atomic_fetch_add(&live_bytes, size) + size);
}

static void *counted(void *block) {
    add_live(counted_size(block));
    return block;
}

void *malloc(size_t size) { return counted(__libc_malloc(size)); }

void *calloc(size_t count, size_t size) { return counted(__libc_calloc(count, size)); }

void free(void *block) {
    long size = counted_size(block);
    if (size) atomic_fetch_sub(&live_bytes, size);
    __libc_free(block);
}

void *realloc(void *old, size_t size) {
    long old_size = counted_size(old);
    void *block = __libc_realloc(old, size);
    if (!block && size) return NULL; /* failed: the old block lives on, and is still counted */
    if (old_size) atomic_fetch_sub(&live_bytes, old_size);
    return counted(block);
}

void *memalign(size_t alignment, size_t size) { return counted(__libc_memalign(alignment, size)); }

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **out, size_t alignment, size_t size) {
    if (alignment % sizeof(void *) || alignment == 0 || alignment & (alignment - 1)) return EINVAL;
    void *block = memalign(alignment, size);
    if (!block) return ENOMEM;
    *out = block;
    return 0;
}

/* glibc's own valloc and pvalloc would take blocks past the counter and free them through it; its reallocarray
 * calls the realloc above. */
void *valloc(size_t size) { return memalign((size_t)sysconf(_SC_PAGESIZE), size); }

void *pvalloc(size_t size) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return memalign(page, (size + page - 1) / page * page);
}

long meter_live_bytes(void) { return atomic_load(&live_bytes); }

long meter_peak_bytes(void) { return atomic_load(&peak_bytes); }

void meter_reset_peak(void) { atomic_store(&peak_bytes, atomic_load(&live_bytes)); }
