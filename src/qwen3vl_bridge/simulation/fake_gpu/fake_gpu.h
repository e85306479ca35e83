// A GPU that computes nothing: shared declarations of the libraries that stand in for CUDA's.
//
// Device memory is mapped and never touched, so torch's allocator runs at real size. Copies from and to the host are
// real. Kernels, matrix products and collectives only write a line to the log, so what they would compute is garbage.
#pragma once
#include <stddef.h>

enum memory_kind { PAGEABLE = 0, DEVICE, PINNED };

// memory.c
size_t total_device_memory(void);                       // bytes: FAKE_GPU_GIB, 80 GiB without it
size_t free_device_memory(void);
int take_device_memory(size_t bytes);                   // counts bytes; 0 if they are not free
void return_device_memory(size_t bytes);
void *map_pages(size_t bytes);                          // zero pages that take no memory until written; NULL if refused
void unmap_pages(void *start, size_t bytes);
void add_range(void *start, size_t bytes, enum memory_kind kind);
size_t remove_range(void *start);                       // its bytes; 0 if no range begins here
enum memory_kind kind_of(const void *address);
void copy_bytes(void *target, const void *source, size_t bytes, const void *stream);
void *new_handle(void);                                 // of streams, events and communicators

// log.c: a line "kind<TAB>stream<TAB>bytes<TAB>name" of FAKE_GPU_LOG.<process id>
void log_event(const char *kind, const char *name, size_t bytes, const void *stream);
int log_is_open(void);
