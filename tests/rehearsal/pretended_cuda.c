/* Preloaded as libcuda.so.1, so that PyTorch's CUDA build believes that this machine has a GPU. It replaces the driver, whose calls all
   succeed and do nothing, and PyTorch's own count of devices. The count is 0 until pretend_devices() sets it, after PyTorch's import. */

static signed char devices = 0;

void pretend_devices(int count) { devices = count; }

int success(void) { return 0; }

#define SUCCEEDS(name) int name(void) __attribute__((alias("success")));
SUCCEEDS(cuCtxGetCurrent)
SUCCEEDS(cuCtxSetCurrent)
SUCCEEDS(cuDeviceGet)
SUCCEEDS(cuDeviceGetAttribute)
SUCCEEDS(cuDevicePrimaryCtxRetain)
SUCCEEDS(cuFuncGetAttribute)
SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuFuncSetCacheConfig)
SUCCEEDS(cuGetErrorString)
SUCCEEDS(cuLaunchCooperativeKernel)
SUCCEEDS(cuLaunchKernel)
SUCCEEDS(cuLinkAddData_v2)
SUCCEEDS(cuLinkComplete)
SUCCEEDS(cuLinkCreate_v2)
SUCCEEDS(cuModuleGetFunction)
SUCCEEDS(cuModuleLoad)
SUCCEEDS(cuModuleLoadData)
SUCCEEDS(cuModuleLoadDataEx)
SUCCEEDS(cuModuleUnload)
SUCCEEDS(cuOccupancyMaxActiveBlocksPerMultiprocessor)
SUCCEEDS(cuPointerGetAttribute)
SUCCEEDS(cuTensorMapEncodeTiled)

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    if (active) *active = 0;
    return 0;
}

int cuGetProcAddress_v2(void) { return 1; /* CUDA_ERROR_INVALID_VALUE: the runtime finds no GPU */ }

/* c10::cuda::device_count(), device_count_ensure_non_zero() and hasPrimaryContext(signed char). */
signed char _ZN3c104cuda12device_countEv(void) { return devices; }
signed char _ZN3c104cuda28device_count_ensure_non_zeroEv(void) { return devices ? devices : 1; }
_Bool _ZN3c104cuda17hasPrimaryContextEa(signed char device) { (void)device; return 0; }
