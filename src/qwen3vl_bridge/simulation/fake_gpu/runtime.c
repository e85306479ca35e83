// The functions of the CUDA runtime that torch calls, for one H100 or a GPU of another compute capability. Functions
// that torch needs and no file here defines are generated when the library is built, and return 0 (success).
#define _GNU_SOURCE
#include "fake_gpu.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CUDA_VERSION_HERE 13000
#define MULTIPROCESSORS 132
#define SHARED_MEMORY_OPT_IN 232448
#define RETURN(pointer, value) do { *(pointer) = (value); return cudaSuccess; } while (0)

// Devices

static int compute_capability(void) {
    const char *major = getenv("FAKE_GPU_MAJOR");
    return major ? atoi(major) : 9;
}

#undef cudaGetDeviceProperties
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *device, int index) {
    *device = (struct cudaDeviceProp){
        .name = "NVIDIA H100 80GB HBM3", .major = compute_capability(), .minor = 0,
        .multiProcessorCount = MULTIPROCESSORS, .warpSize = 32,
        .totalGlobalMem = total_device_memory(), .l2CacheSize = 50 << 20, .memoryBusWidth = 5120,
        .sharedMemPerBlock = 49152, .sharedMemPerBlockOptin = SHARED_MEMORY_OPT_IN, .sharedMemPerMultiprocessor = 233472,
        .regsPerBlock = 65536, .regsPerMultiprocessor = 65536, .maxBlocksPerMultiProcessor = 32,
        .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = 2048, .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535}, .unifiedAddressing = 1, .cooperativeLaunch = 1, .concurrentKernels = 1,
        .asyncEngineCount = 3,
    };
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    switch (attribute) {
        case cudaDevAttrMultiProcessorCount: RETURN(value, MULTIPROCESSORS);
        case cudaDevAttrComputeCapabilityMajor: RETURN(value, compute_capability());
        case cudaDevAttrComputeCapabilityMinor: RETURN(value, 0);
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: RETURN(value, SHARED_MEMORY_OPT_IN);
        case cudaDevAttrMaxSharedMemoryPerBlock: RETURN(value, 49152);
        case cudaDevAttrMaxThreadsPerBlock: RETURN(value, 1024);
        case cudaDevAttrMaxThreadsPerMultiProcessor: RETURN(value, 2048);
        case cudaDevAttrMaxRegistersPerMultiprocessor: RETURN(value, 65536);
        case cudaDevAttrMaxBlocksPerMultiprocessor: RETURN(value, 32);
        case cudaDevAttrMaxGridDimX: RETURN(value, 2147483647);
        case cudaDevAttrWarpSize: RETURN(value, 32);
        default: RETURN(value, 1);
    }
}

static __thread int current_device;
cudaError_t cudaGetDeviceCount(int *count) { RETURN(count, 1); }
cudaError_t cudaGetDevice(int *device) { RETURN(device, current_device); }
cudaError_t cudaSetDevice(int device) { RETURN(&current_device, device); }
cudaError_t cudaDriverGetVersion(int *version) { RETURN(version, CUDA_VERSION_HERE); }
cudaError_t cudaRuntimeGetVersion(int *version) { RETURN(version, CUDA_VERSION_HERE); }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { RETURN(can, 0); }
const char *cudaGetErrorString(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory" : "error of the fake GPU"; }
const char *cudaGetErrorName(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorOfTheFakeGPU"; }

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, (size_t)size, "0000:01:00.0");
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    RETURN(greatest, -5);
}

// Memory

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *free = free_device_memory();
    RETURN(total, total_device_memory());
}

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    if (!take_device_memory(bytes)) return cudaErrorMemoryAllocation;
    *pointer = map_pages(bytes);
    if (!*pointer) return cudaErrorMemoryAllocation;
    add_range(*pointer, bytes, DEVICE);
    log_event("malloc", "device", bytes, NULL);
    return cudaSuccess;
}

cudaError_t cudaFree(void *pointer) {
    if (!pointer) return cudaSuccess;
    int on_device = kind_of(pointer) == DEVICE;
    size_t bytes = remove_range(pointer);
    if (!bytes) return cudaErrorInvalidValue;
    if (on_device) return_device_memory(bytes);
    unmap_pages(pointer, bytes);
    log_event("free", on_device ? "device" : "pinned", bytes, NULL);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    *pointer = map_pages(bytes);
    if (!*pointer) return cudaErrorMemoryAllocation;
    add_range(*pointer, bytes, PINNED);
    log_event("malloc", "pinned", bytes, NULL);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    add_range(pointer, bytes, PINNED);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *pointer) {
    remove_range(pointer);
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return cudaFree(pointer); }
cudaError_t cudaFreeHost(void *pointer) { return cudaFree(pointer); }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    static const enum cudaMemoryType types[] = {cudaMemoryTypeUnregistered, cudaMemoryTypeDevice, cudaMemoryTypeHost};
    enum memory_kind kind = kind_of(pointer);
    *attributes = (struct cudaPointerAttributes){
        .type = types[kind],
        .devicePointer = kind == PAGEABLE ? NULL : (void *)pointer,
        .hostPointer = kind == PINNED ? (void *)pointer : NULL,
    };
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind) {
    copy_bytes(target, source, bytes, NULL);
    log_event("sync", "cudaMemcpy", bytes, NULL);
    return cudaSuccess;
}

// Copies from and to pageable memory synchronize: see API synchronization behavior in CUDA's documentation.
cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    copy_bytes(target, source, bytes, stream);
    if (kind_of(target) == PAGEABLE || kind_of(source) == PAGEABLE) log_event("sync", "cudaMemcpyAsync of pageable memory", bytes, stream);
    return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void *target, int to, const void *source, int from, size_t bytes, cudaStream_t stream) {
    copy_bytes(target, source, bytes, stream);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t stream) {
    log_event("memset", "", bytes, stream);
    if (bytes <= 1 << 20) memset(pointer, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *pointer, int value, size_t bytes) { return cudaMemsetAsync(pointer, value, bytes, NULL); }

cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    *pointer = map_pages(1 << 16);
    add_range(*pointer, 1 << 16, DEVICE);
    return cudaSuccess;
}

// Streams and events

cudaError_t cudaStreamCreate(cudaStream_t *stream) { RETURN(stream, new_handle()); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { RETURN(stream, new_handle()); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { RETURN(stream, new_handle()); }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { RETURN(priority, 0); }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) { RETURN(status, cudaStreamCaptureStatusNone); }
cudaError_t cudaEventCreate(cudaEvent_t *event) { RETURN(event, new_handle()); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { RETURN(event, new_handle()); }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) { RETURN(milliseconds, 1.0f); }

#undef cudaStreamGetCaptureInfo
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
    if (id) *id = 0;
    RETURN(status, cudaStreamCaptureStatusNone);
}

static cudaError_t host_sync(const char *function, const void *stream) {
    log_event("sync", function, 0, stream);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return host_sync("cudaStreamSynchronize", stream); }
cudaError_t cudaDeviceSynchronize(void) { return host_sync("cudaDeviceSynchronize", NULL); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return host_sync("cudaEventSynchronize", NULL); }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    log_event("record", "", (size_t)(uintptr_t)event, stream);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    log_event("wait_event", "", (size_t)(uintptr_t)event, stream);
    return cudaSuccess;
}

// Kernels: torch's libraries register the names of theirs when they are loaded

typedef struct {
    const void *function;
    const char *name;
} kernel_t;

static kernel_t *kernels;
static size_t num_kernels, kernel_capacity;
static int are_sorted;
static pthread_mutex_t kernel_mutex = PTHREAD_MUTEX_INITIALIZER;

void __cudaRegisterFunction(void **module, const char *function, char *device_function, const char *name, int thread_limit,
                            void *thread, void *block, void *block_dim, void *grid_dim, int *warp_size) {
    pthread_mutex_lock(&kernel_mutex);
    if (num_kernels == kernel_capacity) {
        kernel_capacity = kernel_capacity ? 2 * kernel_capacity : 4096;
        kernels = realloc(kernels, kernel_capacity * sizeof(kernel_t));
        if (!kernels) abort();
    }
    kernels[num_kernels++] = (kernel_t){function, name};
    are_sorted = 0;
    pthread_mutex_unlock(&kernel_mutex);
}

static int by_function(const void *left, const void *right) {
    const char *a = ((const kernel_t *)left)->function, *b = ((const kernel_t *)right)->function;
    return (a > b) - (a < b);
}

static cudaError_t launch(const void *function, const void *stream) {
    if (!log_is_open()) return cudaSuccess;
    pthread_mutex_lock(&kernel_mutex);
    if (!are_sorted) qsort(kernels, num_kernels, sizeof(kernel_t), by_function);
    are_sorted = 1;
    kernel_t wanted = {function, NULL}, *kernel = bsearch(&wanted, kernels, num_kernels, sizeof(kernel_t), by_function);
    pthread_mutex_unlock(&kernel_mutex);
    log_event("kernel", kernel ? kernel->name : "unknown", 0, stream);
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) { return launch(function, stream); }
cudaError_t __cudaLaunchKernel(void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) { return launch(function, stream); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) { return launch(function, config->stream); }
void fake_gpu_launch(const char *name, const void *stream) { log_event("triton", name, 0, stream); }  // from driver.c

// `kernel<<<grid, block, shared, stream>>>` pushes its configuration, and a generated function takes it and launches.
static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared = shared;
    pushed.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    RETURN((void **)stream, pushed.stream);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

void **__cudaRegisterFatBinary(void *binary) {
    static void *module[2];
    return module;
}

void __cudaRegisterFatBinaryEnd(void **module) {}
void __cudaUnregisterFatBinary(void **module) {}
void __cudaRegisterVar(void) {}
char __cudaInitModule(void **module) { return 0; }
cudaError_t __cudaGetKernel(void **kernel, const void *function) { RETURN(kernel, (void *)function); }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int size, size_t shared, unsigned flags) { RETURN(blocks, 2); }

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    *attributes = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .binaryVersion = 90, .ptxVersion = 90,
                                              .maxDynamicSharedSizeBytes = SHARED_MEMORY_OPT_IN};
    return cudaSuccess;
}

static long success(void) { return 0; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    void *here = dlsym(RTLD_DEFAULT, name);
    if (result) *result = cudaDriverEntryPointSuccess;
    RETURN(function, here ? here : (void *)success);
}
