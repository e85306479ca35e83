// libnvidia-ml.so.1 as torch's expandable segments ask it.
static char device;

static int count(unsigned *target, unsigned value) {
    *target = value;
    return 0;
}

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *target) { return count(target, 1); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return count((unsigned *)version, 13000); }
int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *processes, void *details) { return count(processes, 0); }
int nvmlDeviceGetGpuFabricInfoV(void *handle, void *fabric) { return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return 3; }  // NVML_ERROR_NOT_SUPPORTED
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 3; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = &device;
    return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) { return nvmlDeviceGetHandleByIndex_v2(0, handle); }
