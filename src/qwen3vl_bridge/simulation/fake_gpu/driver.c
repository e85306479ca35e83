// The functions of the CUDA driver (libcuda.so.1) that Triton calls. Triton compiles for sm_90 and launches by name.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// In the preloaded library; without it nothing is logged.
extern void fake_gpu_launch(const char *name, const void *stream) __attribute__((weak));

static char context, module;

static int number(int *target, int value) {
    *target = value;
    return 0;
}

static int pointer(void **target, void *value) {
    *target = value;
    return 0;
}

static int launch(const char *name, const void *stream) {
    if (fake_gpu_launch) fake_gpu_launch(name, stream);
    return 0;
}

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { return number(version, 13000); }
int cuDeviceGetCount(int *count) { return number(count, 1); }
int cuDeviceGet(int *device, int index) { return number(device, index); }

int cuDeviceGetName(char *name, int size, int device) {
    strncpy(name, "NVIDIA H100 80GB HBM3", (size_t)size);
    return 0;
}

// CUdevice_attribute by number: the header that names them is not in torch's packages.
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
        case 1: return number(value, 1024);      // threads of a block
        case 8: return number(value, 49152);     // shared memory of a block
        case 10: return number(value, 32);       // warp size
        case 12: case 82: return number(value, 65536);  // registers of a block, of a multiprocessor
        case 16: return number(value, 132);      // multiprocessors
        case 36: return number(value, 2619000);  // memory clock in kHz
        case 37: return number(value, 5120);     // memory bus in bits
        case 39: return number(value, 2048);     // threads of a multiprocessor
        case 75: {                               // compute capability
            const char *major = getenv("FAKE_GPU_MAJOR");
            return number(value, major ? atoi(major) : 9);
        }
        case 76: return number(value, 0);
        case 97: return number(value, 232448);   // shared memory of a block, opted in
        default: return number(value, 1);
    }
}

int cuDevicePrimaryCtxRetain(void **target, int device) { return pointer(target, &context); }
int cuCtxGetCurrent(void **target) { return pointer(target, &context); }
int cuCtxGetDevice(int *device) { return number(device, 0); }

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    return number(active, 1);
}

int cuGetErrorString(int error, const char **text) {
    *text = "error of the fake driver";
    return 0;
}

int cuGetErrorName(int error, const char **text) { return cuGetErrorString(error, text); }

// NVRTC asks for the table of its cache, and compiles without one: CUDA_ERROR_NOT_FOUND.
int cuGetExportTable(const void **table, const void *id) { return 500; }

// A function's handle is its name.
int cuModuleLoad(void **target, const char *name) { return pointer(target, &module); }
int cuModuleLoadData(void **target, const void *image) { return pointer(target, &module); }
int cuModuleLoadDataEx(void **target, const void *image, unsigned count, void *options, void *values) { return pointer(target, &module); }
int cuLibraryLoadData(void **target, const void *image, ...) { return pointer(target, &module); }
int cuModuleGetFunction(void **function, void *from, const char *name) { return pointer(function, strdup(name)); }
int cuLibraryGetKernel(void **kernel, void *library, const char *name) { return pointer(kernel, strdup(name)); }
int cuKernelGetFunction(void **function, void *kernel) { return pointer(function, kernel); }

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared, void *stream, void **arguments, void **extra) {
    return launch(function, stream);
}

typedef struct {  // CUlaunchConfig
    unsigned grid[3], block[3], shared;
    void *stream;
} launch_config_t;

int cuLaunchKernelEx(const launch_config_t *config, void *function, void **arguments, void **extra) { return launch(function, config->stream); }

int cuFuncGetAttribute(int *value, int attribute, void *function) {
    return number(value, attribute == 0 ? 1024 : attribute == 4 ? 32 : 0);  // threads of a block, registers
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int size, size_t shared) { return number(blocks, 2); }
int cuOccupancyMaxActiveClusters(int *clusters, void *function, void *config) { return number(clusters, 16); }

int cuPointerGetAttribute(void *value, int attribute, uint64_t address) {
    memcpy(value, &address, sizeof address);
    return 0;
}

#define SUCCESS(function) int function(void) { return 0; }
SUCCESS(cuModuleUnload) SUCCESS(cuModuleGetGlobal_v2) SUCCESS(cuLinkCreate_v2) SUCCESS(cuLinkAddData_v2)
SUCCESS(cuLinkComplete) SUCCESS(cuLinkDestroy) SUCCESS(cuCtxCreate_v2) SUCCESS(cuCtxSetCurrent) SUCCESS(cuCtxPushCurrent_v2)
SUCCESS(cuCtxPopCurrent_v2) SUCCESS(cuCtxSynchronize) SUCCESS(cuCtxGetLimit) SUCCESS(cuCtxSetLimit) SUCCESS(cuFuncSetAttribute)
SUCCESS(cuFuncSetCacheConfig) SUCCESS(cuTensorMapEncodeTiled) SUCCESS(cuTensorMapEncodeIm2col) SUCCESS(cuStreamSynchronize)
SUCCESS(cuStreamCreate) SUCCESS(cuStreamGetCtx) SUCCESS(cuStreamWriteValue32) SUCCESS(cuEventCreate) SUCCESS(cuMemcpyDtoH_v2)
SUCCESS(cuMemcpyHtoD_v2) SUCCESS(cuMemAlloc_v2) SUCCESS(cuMemFree_v2) SUCCESS(cuMemGetAddressRange_v2)
SUCCESS(cuDeviceTotalMem_v2) SUCCESS(cuDeviceGetUuid) SUCCESS(cuLaunchCooperativeKernel) SUCCESS(cuPointerGetAttributes)
