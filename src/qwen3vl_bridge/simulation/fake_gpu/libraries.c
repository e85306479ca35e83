// cuBLAS and NCCL: matrix products and collectives, by name and bytes.
#include "fake_gpu.h"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LARGEST_COLLECTIVE_COPY ((size_t)64 << 20)  // of one rank, whose result is its input

// cuBLAS: a product's line holds its type, m, n, k and the number of matrices; its "bytes" are its floating-point operations

typedef struct {
    const void *stream;
} blas_handle_t;

typedef struct {  // what cublasLtMatrixLayout_t is here
    int type, batch;
    uint64_t rows, columns;
} matrix_t;

static const char *name_of(int type) {
    switch (type) {  // cudaDataType
        case 0: return "float32";
        case 1: return "float64";
        case 2: return "float16";
        case 14: return "bfloat16";
        case 28: return "float8_e4m3";
        case 29: return "float8_e5m2";
        default: return "other";
    }
}

static int product(const char *function, int type, uint64_t m, uint64_t n, uint64_t k, int batch, const void *stream) {
    char line[160];
    snprintf(line, sizeof line, "%s %s %zu %zu %zu %d", function, name_of(type), (size_t)m, (size_t)n, (size_t)k, batch);
    log_event("gemm", line, 2 * m * n * k * (size_t)batch, stream);
    return 0;
}

static const void *stream_of(void *handle) { return ((blas_handle_t *)handle)->stream; }

int cublasCreate_v2(void **handle) {
    *handle = calloc(1, sizeof(blas_handle_t));
    return *handle ? 0 : 3;  // CUBLAS_STATUS_ALLOC_FAILED
}

int cublasDestroy_v2(void *handle) {
    free(handle);
    return 0;
}

int cublasSetStream_v2(void *handle, void *stream) {
    ((blas_handle_t *)handle)->stream = stream;
    return 0;
}

int cublasGetMathMode(void *handle, int *mode) {
    *mode = 0;
    return 0;
}

int cublasGetPointerMode_v2(void *handle, int *mode) {
    *mode = 0;
    return 0;
}

int cublasGemmEx(void *handle, int transpose_a, int transpose_b, int m, int n, int k, const void *alpha, const void *a, int type_a,
                 int lda, const void *b, int type_b, int ldb, const void *beta, void *c, int type_c, int ldc, int compute, int algorithm) {
    return product("cublasGemmEx", type_a, m, n, k, 1, stream_of(handle));
}

int cublasGemmStridedBatchedEx(void *handle, int transpose_a, int transpose_b, int m, int n, int k, const void *alpha, const void *a,
                               int type_a, int lda, long long stride_a, const void *b, int type_b, int ldb, long long stride_b,
                               const void *beta, void *c, int type_c, int ldc, long long stride_c, int batch, int compute, int algorithm) {
    return product("cublasGemmStridedBatchedEx", type_a, m, n, k, batch, stream_of(handle));
}

int cublasSgemm_v2(void *handle, int transpose_a, int transpose_b, int m, int n, int k) {
    return product("cublasSgemm", 0, m, n, k, 1, stream_of(handle));
}

int cublasDgemm_v2(void *handle, int transpose_a, int transpose_b, int m, int n, int k) {
    return product("cublasDgemm", 1, m, n, k, 1, stream_of(handle));
}

int cublasSgemmStridedBatched(void *handle, int transpose_a, int transpose_b, int m, int n, int k, const void *alpha, const void *a, int lda,
                              long long stride_a, const void *b, int ldb, long long stride_b, const void *beta, void *c, int ldc,
                              long long stride_c, int batch) {
    return product("cublasSgemmStridedBatched", 0, m, n, k, batch, stream_of(handle));
}

// Called by the linear algebra functions that `fake_gpu.py` generates. Their matrix sizes are not known.
int other_product(const char *function, void *handle) { return product(function, -1, 0, 0, 0, 0, stream_of(handle)); }

int cublasLtCreate(void **handle) { return cublasCreate_v2(handle); }
int cublasLtDestroy(void *handle) { return cublasDestroy_v2(handle); }
size_t cublasLtGetVersion(void) { return 130100; }

static int make_description(void **description) {
    *description = calloc(1, 64);
    return *description ? 0 : 3;
}

static int free_description(void *description) {
    free(description);
    return 0;
}

int cublasLtMatmulDescCreate(void **description) { return make_description(description); }
int cublasLtMatmulDescDestroy(void *description) { return free_description(description); }
int cublasLtMatmulPreferenceCreate(void **description) { return make_description(description); }
int cublasLtMatmulPreferenceDestroy(void *description) { return free_description(description); }
int cublasLtMatrixLayoutDestroy(void *layout) { return free_description(layout); }

int cublasLtMatrixLayoutInit_internal(void *layout, size_t size, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    *(matrix_t *)layout = (matrix_t){type, 1, rows, columns};
    return 0;
}

int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    int status = make_description(layout);
    return status ? status : cublasLtMatrixLayoutInit_internal(*layout, 64, type, rows, columns, leading);
}

int cublasLtMatrixLayoutSetAttribute(void *layout, int attribute, const void *value, size_t size) {
    if (attribute == 5) ((matrix_t *)layout)->batch = *(const int *)value;  // CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT
    return 0;
}

int cublasLtMatmul(void *handle, void *operation, const void *alpha, const void *a, const matrix_t *layout_a, const void *b,
                   const matrix_t *layout_b, const void *beta, const void *c, const matrix_t *layout_c, void *d, const matrix_t *layout_d,
                   const void *algorithm, void *workspace, size_t workspace_bytes, void *stream) {
    uint64_t m = layout_d->rows, n = layout_d->columns, k = layout_a->rows * layout_a->columns / (m ? m : 1);
    return product("cublasLtMatmul", layout_a->type, m, n, k, layout_d->batch, stream);
}

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *count) {
    memset(results, 0, 112);  // one cublasLtMatmulHeuristicResult_t, whose state is success
    *count = 1;
    return 0;
}

// NCCL

static int make_communicator(void **communicator) {
    *communicator = new_handle();
    return 0;
}

int ncclCommInitRank(void **communicator, int ranks, ...) { return make_communicator(communicator); }
int ncclCommInitRankConfig(void **communicator, int ranks, ...) { return make_communicator(communicator); }
int ncclCommInitRankScalable(void **communicator, int ranks, ...) { return make_communicator(communicator); }
int ncclCommSplit(void *parent, int color, int key, void **communicator, void *config) { return make_communicator(communicator); }
const char *ncclGetErrorString(int error) { return "error of the fake NCCL"; }
const char *ncclGetLastError(void *communicator) { return ""; }

int ncclGetUniqueId(char *id) {
    memset(id, 7, 128);
    return 0;
}

int ncclGetVersion(int *version) {
    *version = 22907;
    return 0;
}

int ncclCommCount(void *communicator, int *count) {
    *count = 1;
    return 0;
}

int ncclCommGetAsyncError(void *communicator, int *error) {
    *error = 0;
    return 0;
}

static int collective(const char *name, const void *source, void *target, size_t count, int type, const void *stream) {
    static const size_t bytes_of[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // ncclDataType_t
    size_t bytes = count * bytes_of[type];
    log_event("nccl", name, bytes, stream);
    if (source != target && bytes <= LARGEST_COLLECTIVE_COPY) memmove(target, source, bytes);
    return 0;
}

int ncclAllGather(const void *source, void *target, size_t count, int type, void *communicator, void *stream) { return collective("AllGather", source, target, count, type, stream); }
int ncclAlltoAll(const void *source, void *target, size_t count, int type, void *communicator, void *stream) { return collective("AlltoAll", source, target, count, type, stream); }
int ncclAllReduce(const void *source, void *target, size_t count, int type, int operation, void *communicator, void *stream) { return collective("AllReduce", source, target, count, type, stream); }
int ncclReduceScatter(const void *source, void *target, size_t count, int type, int operation, void *communicator, void *stream) { return collective("ReduceScatter", source, target, count, type, stream); }
int ncclReduce(const void *source, void *target, size_t count, int type, int operation, int root, void *communicator, void *stream) { return collective("Reduce", source, target, count, type, stream); }
int ncclBroadcast(const void *source, void *target, size_t count, int type, int root, void *communicator, void *stream) { return collective("Broadcast", source, target, count, type, stream); }
int ncclBcast(void *buffer, size_t count, int type, int root, void *communicator, void *stream) { return collective("Broadcast", buffer, buffer, count, type, stream); }
int ncclSend(const void *source, size_t count, int type, int peer, void *communicator, void *stream) { return collective("Send", source, (void *)source, count, type, stream); }
int ncclRecv(void *target, size_t count, int type, int peer, void *communicator, void *stream) { return collective("Recv", target, target, count, type, stream); }
