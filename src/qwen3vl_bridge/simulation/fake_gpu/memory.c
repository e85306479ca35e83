// Memory of the device and of the host, and the virtual memory of the driver that expandable segments use.
#define _GNU_SOURCE
#include "fake_gpu.h"
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE ((size_t)4096)
#define LARGE_PAGE ((size_t)2 << 20)
#define LARGEST_DEVICE_COPY ((size_t)1 << 20)  // a larger copy would touch pages of big tensors, whose values are garbage

typedef struct {
    char *start;
    size_t bytes;
    enum memory_kind kind;
} range_t;

static range_t *ranges;
static size_t num_ranges, capacity, bytes_taken;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

size_t total_device_memory(void) {
    const char *gib = getenv("FAKE_GPU_GIB");
    return (size_t)((gib ? atof(gib) : 80.0) * (double)((size_t)1 << 30));
}

size_t free_device_memory(void) {
    size_t total = total_device_memory();
    return total > bytes_taken ? total - bytes_taken : 0;
}

int take_device_memory(size_t bytes) {
    pthread_mutex_lock(&mutex);
    int fits = bytes_taken + bytes <= total_device_memory();
    if (fits) bytes_taken += bytes;
    pthread_mutex_unlock(&mutex);
    return fits;
}

void return_device_memory(size_t bytes) {
    pthread_mutex_lock(&mutex);
    bytes_taken -= bytes;
    pthread_mutex_unlock(&mutex);
}

void *map_pages(size_t bytes) {
    size_t whole = bytes ? (bytes + PAGE - 1) / PAGE * PAGE : PAGE;
    void *start = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return start == MAP_FAILED ? NULL : start;
}

void unmap_pages(void *start, size_t bytes) { munmap(start, bytes ? (bytes + PAGE - 1) / PAGE * PAGE : PAGE); }

// Index of the range that contains the address, or num_ranges.
static size_t index_of(const void *address) {
    size_t i = 0;
    while (i < num_ranges) {
        size_t offset = (size_t)((const char *)address - ranges[i].start);
        if ((const char *)address >= ranges[i].start && offset < ranges[i].bytes) break;
        i++;
    }
    return i;
}

void add_range(void *start, size_t bytes, enum memory_kind kind) {
    pthread_mutex_lock(&mutex);
    if (num_ranges == capacity) {
        capacity = capacity ? 2 * capacity : 1024;
        ranges = realloc(ranges, capacity * sizeof(range_t));
        if (!ranges) abort();
    }
    ranges[num_ranges++] = (range_t){start, bytes ? bytes : 1, kind};
    pthread_mutex_unlock(&mutex);
}

size_t remove_range(void *start) {
    size_t bytes = 0;
    pthread_mutex_lock(&mutex);
    size_t i = index_of(start);
    if (i < num_ranges && ranges[i].start == (char *)start) {
        bytes = ranges[i].bytes;
        ranges[i] = ranges[--num_ranges];
    }
    pthread_mutex_unlock(&mutex);
    return bytes;
}

enum memory_kind kind_of(const void *address) {
    pthread_mutex_lock(&mutex);
    size_t i = index_of(address);
    enum memory_kind kind = i < num_ranges ? ranges[i].kind : PAGEABLE;
    pthread_mutex_unlock(&mutex);
    return kind;
}

void copy_bytes(void *target, const void *source, size_t bytes, const void *stream) {
    int to_device = kind_of(target) == DEVICE, from_device = kind_of(source) == DEVICE;
    static const char *const names[2][2] = {{"host to host", "device to host"}, {"host to device", "device to device"}};
    log_event("copy", names[to_device][from_device], bytes, stream);
    if (!(to_device && from_device) || bytes <= LARGEST_DEVICE_COPY) memmove(target, source, bytes);
}

void *new_handle(void) {
    static uintptr_t last = 0x1000;
    return (void *)__atomic_add_fetch(&last, 16, __ATOMIC_RELAXED);
}

// The driver's virtual memory: addresses are reserved at once, and physical memory (a handle that holds its size) is counted.
int cuMemGetAllocationGranularity(size_t *granularity, const void *properties, int option) {
    *granularity = LARGE_PAGE;
    return 0;
}

int cuMemAddressReserve(unsigned long long *address, size_t bytes, size_t alignment, unsigned long long wanted, unsigned long long flags) {
    char *start = map_pages(bytes + LARGE_PAGE);
    if (!start) return 2;  // CUDA_ERROR_OUT_OF_MEMORY
    size_t unaligned = (uintptr_t)start % LARGE_PAGE;
    char *aligned = unaligned ? start + LARGE_PAGE - unaligned : start;
    add_range(aligned, bytes, DEVICE);
    *address = (uintptr_t)aligned;
    return 0;
}

int cuMemAddressFree(unsigned long long address, size_t bytes) {
    remove_range((void *)(uintptr_t)address);
    unmap_pages((void *)(uintptr_t)address, bytes);
    return 0;
}

int cuMemCreate(unsigned long long *handle, size_t bytes, const void *properties, unsigned long long flags) {
    if (!take_device_memory(bytes)) return 2;
    size_t *size = malloc(sizeof *size);
    if (!size) abort();
    *size = bytes;
    *handle = (uintptr_t)size;
    log_event("malloc", "device", bytes, NULL);
    return 0;
}

int cuMemRelease(unsigned long long handle) {
    size_t *size = (size_t *)(uintptr_t)handle;
    return_device_memory(*size);
    log_event("free", "device", *size, NULL);
    free(size);
    return 0;
}

int cuMemMap(unsigned long long address, size_t bytes, size_t offset, unsigned long long handle, unsigned long long flags) { return 0; }

int cuMemUnmap(unsigned long long address, size_t bytes) {
    madvise((void *)(uintptr_t)address, bytes, MADV_DONTNEED);
    return 0;
}

int cuMemSetAccess(unsigned long long address, size_t bytes, const void *description, size_t count) { return 0; }
