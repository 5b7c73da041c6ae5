/* A fake libnvidia-ml.so.1: what pynvml asks of NVML, answered for GPUs that the environment names (see build.py).

   Structures and numbers are those of nvml.h; a structure that the real library would fill in otherwise makes pynvml
   misread it here as well. Instances that are made live as long as the process. Nothing here computes. */

#include "machine.h"

enum {
    OK, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15, RESET_REQUIRED = 16, IN_USE = 19,
    INSUFFICIENT_RESOURCES = 23,
};
#define NONE 0xFFFFFFFFu
#define MOST 8 /* GPUs, and instances on each */

/* Products */

typedef struct {
    unsigned number; /* of NVML's NVML_GPU_INSTANCE_PROFILE_… */
    unsigned id;     /* as nvidia-smi lists it */
    const char *name;
    unsigned slices, multiprocessors, size; /* size: slices of memory */
    unsigned long long mib;
    int starts[MOST]; /* ends with -1 */
} Profile;

typedef struct {
    const char *word, *name;
    unsigned long long mib;
    unsigned multiprocessors, cores; /* cores: of one multiprocessor */
    int major, minor;
    const Profile *profiles; /* ends with an empty name; NULL: no MIG */
} Product;

#define SEVENTHS(one, twice, two, three, four, seven, a, b, c, d, e, m1, m1x, m2, m3, m4, m7)                         \
    {{0, 19, one, 1, a, 1, m1, {0, 1, 2, 3, 4, 5, 6, -1}}, {7, 20, one "+me", 1, a, 1, m1, {0, 1, 2, 3, 4, 5, 6, -1}}, \
     {9, 15, twice, 1, a, 2, m1x, {0, 2, 4, 6, -1}},       {1, 14, two, 2, b, 2, m2, {0, 2, 4, -1}},                   \
     {2, 9, three, 3, c, 4, m3, {0, 4, -1}},               {3, 5, four, 4, d, 4, m4, {0, -1}},                         \
     {4, 0, seven, 7, e, 8, m7, {0, -1}},                  {0}}

static const Profile A100_40[] = SEVENTHS("1g.5gb", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb", 14, 28, 42,
                                          56, 98, 4864, 9856, 9856, 19968, 19968, 40192);
static const Profile A100_80[] = SEVENTHS("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", 14, 28, 42,
                                          56, 98, 9728, 19968, 19968, 40192, 40192, 80640);
static const Profile H100_80[] = SEVENTHS("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", 16, 32, 60,
                                          64, 132, 9984, 20096, 20096, 40448, 40448, 81152);
static const Profile H200_141[] = SEVENTHS("1g.18gb", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb", 16, 32, 60,
                                           64, 132, 16384, 32768, 32768, 65536, 65536, 131072);
static const Profile A30[] = {{0, 14, "1g.6gb", 1, 14, 1, 5888, {0, 1, 2, 3, -1}},
                              {1, 5, "2g.12gb", 2, 28, 2, 11899, {0, 2, -1}},
                              {3, 0, "4g.24gb", 4, 56, 4, 23931, {0, -1}},
                              {0}};

#define ROW(word, name, mib, multiprocessors, cores, major, minor, profiles)                                           \
    {word, name, mib, multiprocessors, cores, major, minor, profiles},
static const Product products[] = {PRODUCTS(ROW)};

/* The machine */

typedef struct Gpu Gpu;
typedef struct {
    Gpu *gpu;
    unsigned id;
    const Profile *profile;
    unsigned start;
    int there, computes; /* computes: it has a compute instance, of all its slices */
} Instance;
typedef struct { /* what a handle of a device points at: instance is NULL for a whole GPU */
    Gpu *gpu;
    Instance *instance;
} Device;
struct Gpu {
    unsigned index;
    const Product *product;
    int mig;
    Instance instances[MOST];
    Device itself, parts[MOST];
    int watched;
};

static Gpu gpus[MOST];
static unsigned many;
static int initialised;
static unsigned told; /* Xids that have been handed out */

static int state_of(const Gpu *gpu)
{
    if (said("lost", gpu->index))
        return GPU_IS_LOST;
    return said("reset", gpu->index) ? RESET_REQUIRED : OK;
}

#define ENTER()                                                                                                        \
    do {                                                                                                               \
        int code_ = forced(__func__);                                                                                  \
        if (code_ != OK)                                                                                               \
            return code_;                                                                                              \
        if (!initialised)                                                                                              \
            return UNINITIALIZED;                                                                                      \
    } while (0)
#define ENTER_GPU(gpu)                                                                                                 \
    do {                                                                                                               \
        ENTER();                                                                                                       \
        int state_ = state_of(gpu);                                                                                    \
        if (state_ != OK)                                                                                              \
            return state_;                                                                                             \
    } while (0)

static int count(const Profile *profile)
{
    int found = 0;
    while (profile->starts[found] >= 0)
        found++;
    return found;
}

static int overlaps(const Gpu *gpu, unsigned start, unsigned size)
{
    for (int i = 0; i < MOST; i++) {
        const Instance *other = &gpu->instances[i];
        if (other->there && start < other->start + other->profile->size && other->start < start + size)
            return 1;
    }
    return 0;
}

static Instance *cut(Gpu *gpu, const Profile *profile, int start)
{
    for (int i = MOST - 1; start < 0 && i >= 0; i--) /* without a place, the last that is free */
        if (i < count(profile) && !overlaps(gpu, profile->starts[i], profile->size))
            start = profile->starts[i];
    if (start < 0 || overlaps(gpu, start, profile->size))
        return NULL;
    for (unsigned i = 0; i < MOST; i++) {
        Instance *one = &gpu->instances[i];
        if (!one->there) {
            *one = (Instance){gpu, i + 1, profile, start, 1, 0};
            gpu->parts[i] = (Device){gpu, one};
            return one;
        }
    }
    return NULL;
}

static const Profile *profile_by_id(const Gpu *gpu, unsigned id)
{
    for (const Profile *profile = gpu->product->profiles; profile && profile->name; profile++)
        if (profile->id == id)
            return profile;
    return NULL;
}

static const Profile *profile_by_number(const Gpu *gpu, unsigned number)
{
    for (const Profile *profile = gpu->product->profiles; profile && profile->name; profile++)
        if (profile->number == number)
            return profile;
    return NULL;
}

/* "a100-80gb-mig=3g.40gb+2g.20gb" */
static int furnish(char *text)
{
    Gpu *gpu = &gpus[many];
    memset(gpu, 0, sizeof *gpu);
    char *parts = strchr(text, '=');
    if (parts)
        *parts++ = 0;
    size_t length = strlen(text);
    if (length > 4 && !strcmp(text + length - 4, "-mig")) {
        gpu->mig = 1;
        text[length - 4] = 0;
    }
    for (size_t i = 0; i < sizeof products / sizeof *products; i++)
        if (!strcmp(products[i].word, text))
            gpu->product = &products[i];
    if (!gpu->product)
        return 0;
    gpu->index = many++;
    gpu->itself = (Device){gpu, NULL};
    for (char *keep, *part = parts ? strtok_r(parts, "+", &keep) : NULL; part; part = strtok_r(NULL, "+", &keep)) {
        const Profile *profile = gpu->product->profiles;
        while (profile && profile->name && strcmp(profile->name, part))
            profile++;
        Instance *one = profile && profile->name ? cut(gpu, profile, -1) : NULL;
        if (!one)
            return 0;
        one->computes = 1;
    }
    return 1;
}

/* Session */

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    int code = forced(__func__);
    if (code != OK)
        return code;
    const char *wanted = getenv("COTENANT_FAKE_GPUS");
    if (!wanted)
        return DRIVER_NOT_LOADED;
    char text[1024];
    snprintf(text, sizeof text, "%s", wanted);
    many = 0;
    told = 0;
    for (char *keep, *one = strtok_r(text, ",", &keep); one; one = strtok_r(NULL, ",", &keep))
        if (many == MOST || !furnish(one)) {
            fprintf(stderr, "the fake driver knows no GPU %s\n", one);
            return INVALID_ARGUMENT;
        }
    initialised = 1;
    return OK;
}

int nvmlShutdown(void)
{
    initialised = 0;
    return OK;
}

const char *nvmlErrorString(int code)
{
    (void)code;
    return "an error of the fake driver";
}

static void version(char *driver, size_t size, int *cuda)
{
    const char *text = getenv("COTENANT_FAKE_DRIVER");
    char own[64];
    int major = 13, minor = 0;
    snprintf(own, sizeof own, "%s", text && *text ? text : "580.95.05/13.0");
    char *slash = strchr(own, '/');
    if (slash) {
        *slash = 0;
        sscanf(slash + 1, "%d.%d", &major, &minor);
    }
    if (driver)
        snprintf(driver, size, "%s", own);
    if (cuda)
        *cuda = 1000 * major + 10 * minor;
}

int nvmlSystemGetDriverVersion(char *text, unsigned size)
{
    ENTER();
    version(text, size, NULL);
    return OK;
}

int nvmlSystemGetCudaDriverVersion_v2(int *number)
{
    ENTER();
    version(NULL, 0, number);
    return OK;
}

int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned size)
{
    ENTER();
    snprintf(name, size, "/usr/bin/program-%u", pid);
    return OK;
}

/* Devices */

int nvmlDeviceGetCount_v2(unsigned *count)
{
    ENTER();
    *count = many;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device)
{
    ENTER();
    if (index >= many)
        return INVALID_ARGUMENT;
    *device = &gpus[index].itself;
    return state_of(&gpus[index]);
}

static void own_uuid(const Device *device, char *text, size_t size)
{
    uuid_of(device->gpu->index, device->instance ? device->instance->id : 0, text, size);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device)
{
    ENTER();
    char own[96];
    for (unsigned index = 0; index < many; index++) {
        Gpu *gpu = &gpus[index];
        own_uuid(&gpu->itself, own, sizeof own);
        if (!strcmp(own, uuid)) {
            *device = &gpu->itself;
            return state_of(gpu);
        }
        for (int i = 0; i < MOST; i++)
            if (gpu->instances[i].there && gpu->instances[i].computes) {
                own_uuid(&gpu->parts[i], own, sizeof own);
                if (!strcmp(own, uuid)) {
                    *device = &gpu->parts[i];
                    return state_of(gpu);
                }
            }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetName(const Device *device, char *text, unsigned size)
{
    ENTER_GPU(device->gpu);
    const char *name = device->gpu->product->name;
    if (device->instance)
        snprintf(text, size, "%s MIG %s", name, device->instance->profile->name);
    else
        snprintf(text, size, "%s", name);
    return OK;
}

int nvmlDeviceGetUUID(const Device *device, char *text, unsigned size)
{
    ENTER();
    own_uuid(device, text, size);
    return OK;
}

static unsigned long long used(const Device *device)
{
    char rest[256];
    unsigned index, pid, part;
    unsigned long long bytes, sum = 0;
    for (unsigned nth = 0; line_of("process", nth, rest, sizeof rest); nth++) {
        int fields = sscanf(rest, "%u %u %llu %u", &index, &pid, &bytes, &part);
        if (fields >= 3 && index == device->gpu->index)
            if (!device->instance || (fields == 4 && part == device->instance->id))
                sum += bytes;
    }
    return sum;
}

int nvmlDeviceGetMemoryInfo(const Device *device, unsigned long long *info)
{
    ENTER_GPU(device->gpu);
    info[0] = (device->instance ? device->instance->profile->mib : device->gpu->product->mib) << 20;
    info[2] = used(device);
    info[1] = info[0] - info[2];
    return OK;
}

int nvmlDeviceGetUtilizationRates(const Device *device, unsigned *rates)
{
    ENTER_GPU(device->gpu);
    if (device->gpu->mig)
        return NOT_SUPPORTED;
    rates[0] = 42;
    rates[1] = 17;
    return OK;
}

int nvmlDeviceGetPowerUsage(const Device *device, unsigned *milliwatts)
{
    ENTER_GPU(device->gpu);
    if (device->instance)
        return NOT_SUPPORTED;
    *milliwatts = 123456;
    return OK;
}

int nvmlDeviceGetClockInfo(const Device *device, unsigned type, unsigned *clock)
{
    ENTER_GPU(device->gpu);
    if (device->instance)
        return NOT_SUPPORTED;
    *clock = type == 1 ? 1980 : 1500;
    return OK;
}

int nvmlDeviceGetTemperature(const Device *device, unsigned sensor, unsigned *degrees)
{
    (void)sensor;
    ENTER_GPU(device->gpu);
    if (device->instance)
        return NOT_SUPPORTED;
    *degrees = 36;
    return OK;
}

int nvmlDeviceGetMinorNumber(const Device *device, unsigned *minor)
{
    ENTER_GPU(device->gpu);
    *minor = device->gpu->index;
    return OK;
}

int nvmlDeviceGetComputeMode(const Device *device, unsigned *mode)
{
    char rest[256];
    unsigned index, value;
    ENTER_GPU(device->gpu);
    *mode = 0;
    for (unsigned nth = 0; line_of("mode", nth, rest, sizeof rest); nth++)
        if (sscanf(rest, "%u %u", &index, &value) == 2 && index == device->gpu->index)
            *mode = value;
    return OK;
}

typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    unsigned type;
    int code;
    unsigned long long value;
} Field;

int nvmlDeviceGetFieldValues(const Device *device, int count, Field *fields)
{
    char rest[256];
    unsigned index, value;
    ENTER_GPU(device->gpu);
    for (int i = 0; i < count; i++) {
        fields[i].type = 1;
        fields[i].code = fields[i].field == 230 ? OK : NOT_SUPPORTED; /* the recovery action */
        fields[i].value = 0;
        for (unsigned nth = 0; line_of("action", nth, rest, sizeof rest); nth++)
            if (sscanf(rest, "%u %u", &index, &value) == 2 && index == device->gpu->index)
                fields[i].value = value;
    }
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(const Device *device, int *major, int *minor)
{
    ENTER_GPU(device->gpu);
    *major = device->gpu->product->major;
    *minor = device->gpu->product->minor;
    return OK;
}

int nvmlDeviceGetNumGpuCores(const Device *device, unsigned *cores)
{
    ENTER_GPU(device->gpu);
    if (device->gpu->mig)
        return NOT_SUPPORTED;
    *cores = device->gpu->product->multiprocessors * device->gpu->product->cores;
    return OK;
}

typedef struct {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
} Process;

int nvmlDeviceGetComputeRunningProcesses_v3(const Device *device, unsigned *count, Process *processes)
{
    char rest[256];
    unsigned index, pid, part, found = 0;
    unsigned long long bytes;
    ENTER_GPU(device->gpu);
    for (unsigned nth = 0; line_of("process", nth, rest, sizeof rest); nth++) {
        int fields = sscanf(rest, "%u %u %llu %u", &index, &pid, &bytes, &part);
        if (fields < 3 || index != device->gpu->index)
            continue;
        if (device->instance && (fields < 4 || part != device->instance->id))
            continue;
        if (processes && found < *count)
            processes[found] = (Process){pid, bytes, fields == 4 ? part : NONE, fields == 4 ? 0 : NONE};
        found++;
    }
    unsigned room = processes ? *count : 0;
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : OK;
}

/* MIG */

int nvmlDeviceGetMigMode(const Device *device, unsigned *now, unsigned *next)
{
    ENTER_GPU(device->gpu);
    if (!device->gpu->product->profiles)
        return NOT_SUPPORTED;
    *now = device->gpu->mig;
    *next = device->gpu->mig || said("mig", device->gpu->index);
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(const Device *device, unsigned *count)
{
    ENTER_GPU(device->gpu);
    *count = device->gpu->product->profiles ? 7 : 0;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(const Device *device, unsigned index, Device **part)
{
    ENTER_GPU(device->gpu);
    for (int i = 0; i < MOST; i++) {
        const Instance *one = &device->gpu->instances[i];
        if (one->there && one->computes && !index--) {
            *part = &device->gpu->parts[i];
            return OK;
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetGpuInstanceId(const Device *device, unsigned *id)
{
    ENTER_GPU(device->gpu);
    if (!device->instance)
        return INVALID_ARGUMENT;
    *id = device->instance->id;
    return OK;
}

typedef struct {
    unsigned multiprocessors, engines[5], gpu_slices, compute_slices;
    unsigned long long mib;
} Attributes;

int nvmlDeviceGetAttributes_v2(const Device *device, Attributes *attributes)
{
    ENTER_GPU(device->gpu);
    if (!device->instance)
        return NOT_SUPPORTED;
    const Profile *profile = device->instance->profile;
    *attributes = (Attributes){profile->multiprocessors, {1, 0, 0, 0, 0}, profile->slices, profile->slices, profile->mib};
    return OK;
}

typedef struct {
    unsigned version, id, p2p, slices, instances, multiprocessors, engines[5];
    unsigned long long mib;
    char name[96];
} ProfileInfo;

int nvmlDeviceGetGpuInstanceProfileInfoV(const Device *device, unsigned number, ProfileInfo *info)
{
    ENTER_GPU(device->gpu);
    const Profile *profile = profile_by_number(device->gpu, number);
    if (!profile)
        return NOT_SUPPORTED;
    if (info->version != (sizeof *info | 2u << 24))
        return 25;
    info->id = profile->id;
    info->slices = profile->slices;
    info->instances = profile->slices == 1 ? 7 : 1;
    info->multiprocessors = profile->multiprocessors;
    info->mib = profile->mib;
    snprintf(info->name, sizeof info->name, "MIG %s", profile->name);
    return OK;
}

typedef struct {
    unsigned start, size;
} Placement;

int nvmlDeviceGetGpuInstancePossiblePlacements_v2(const Device *device, unsigned id, Placement *placements, unsigned *room)
{
    ENTER_GPU(device->gpu);
    const Profile *profile = profile_by_id(device->gpu, id);
    if (!profile || !device->gpu->mig)
        return NOT_SUPPORTED;
    unsigned found = count(profile);
    for (unsigned i = 0; placements && i < found && i < *room; i++)
        placements[i] = (Placement){profile->starts[i], profile->size};
    *room = found;
    return OK;
}

static int made(const Device *device, unsigned id, int start, Instance **instance)
{
    const Profile *profile = profile_by_id(device->gpu, id);
    if (!profile || !device->gpu->mig)
        return NOT_SUPPORTED;
    *instance = cut(device->gpu, profile, start);
    return *instance ? OK : INSUFFICIENT_RESOURCES;
}

int nvmlDeviceCreateGpuInstance(const Device *device, unsigned id, Instance **instance)
{
    ENTER_GPU(device->gpu);
    return made(device, id, -1, instance);
}

int nvmlDeviceCreateGpuInstanceWithPlacement(const Device *device, unsigned id, const Placement *at, Instance **instance)
{
    ENTER_GPU(device->gpu);
    return made(device, id, at->start, instance);
}

typedef struct {
    Device *device;
    unsigned id, profile;
    Placement placement;
} InstanceInfo;

int nvmlGpuInstanceGetInfo(const Instance *instance, InstanceInfo *info)
{
    ENTER_GPU(instance->gpu);
    *info = (InstanceInfo){&instance->gpu->itself, instance->id, instance->profile->id,
                           {instance->start, instance->profile->size}};
    return OK;
}

int nvmlGpuInstanceDestroy(Instance *instance)
{
    ENTER_GPU(instance->gpu);
    if (instance->computes)
        return IN_USE;
    instance->there = 0;
    return OK;
}

int nvmlDeviceGetGpuInstanceById(const Device *device, unsigned id, Instance **instance)
{
    ENTER_GPU(device->gpu);
    for (int i = 0; i < MOST; i++) {
        if (device->gpu->instances[i].there && device->gpu->instances[i].id == id) {
            *instance = &device->gpu->instances[i];
            return OK;
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetComputeInstanceId(const Device *device, unsigned *id)
{
    ENTER_GPU(device->gpu);
    *id = 0;
    return device->instance ? OK : INVALID_ARGUMENT;
}

int nvmlGpuInstanceGetComputeInstanceById(Instance *instance, unsigned id, Instance **compute)
{
    ENTER_GPU(instance->gpu);
    *compute = instance;
    return instance->computes && id == 0 ? OK : NOT_FOUND;
}

typedef struct {
    unsigned version, id, slices, instances, multiprocessors, engines[5];
    char name[96];
} ComputeProfileInfo;

int nvmlGpuInstanceGetComputeInstanceProfileInfoV(const Instance *instance, unsigned number, unsigned engines,
                                                  ComputeProfileInfo *info)
{
    static const unsigned SLICES[] = {1, 2, 3, 4, 7};
    ENTER_GPU(instance->gpu);
    if (number >= sizeof SLICES / sizeof *SLICES || engines || SLICES[number] > instance->profile->slices)
        return NOT_SUPPORTED;
    if (info->version != (sizeof *info | 2u << 24))
        return 25;
    info->id = number;
    info->slices = SLICES[number];
    return OK;
}

int nvmlGpuInstanceCreateComputeInstance(Instance *instance, unsigned id, Instance **compute)
{
    static const unsigned SLICES[] = {1, 2, 3, 4, 7};
    ENTER_GPU(instance->gpu);
    if (id >= sizeof SLICES / sizeof *SLICES || SLICES[id] != instance->profile->slices)
        return NOT_SUPPORTED; /* parts of an instance are not what this is for */
    if (instance->computes)
        return INSUFFICIENT_RESOURCES;
    instance->computes = 1;
    *compute = instance;
    return OK;
}

int nvmlComputeInstanceDestroy(Instance *compute)
{
    ENTER_GPU(compute->gpu);
    if (used(&compute->gpu->parts[compute->id - 1]))
        return IN_USE;
    compute->computes = 0;
    return OK;
}

/* Events */

typedef struct {
    Device *device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} Event;

int nvmlEventSetCreate(void **set)
{
    ENTER();
    *set = &told;
    return OK;
}

int nvmlEventSetFree(void *set)
{
    (void)set;
    return OK;
}

int nvmlDeviceRegisterEvents(const Device *device, unsigned long long types, void *set)
{
    (void)set;
    ENTER_GPU(device->gpu);
    if (device->instance || types != 8)
        return NOT_SUPPORTED;
    device->gpu->watched = 1;
    return OK;
}

int nvmlEventSetWait_v2(void *set, Event *event, unsigned milliseconds)
{
    char rest[256];
    unsigned index;
    unsigned long long xid;
    (void)set;
    (void)milliseconds;
    ENTER();
    while (line_of("xid", told, rest, sizeof rest)) {
        told++;
        if (sscanf(rest, "%u %llu", &index, &xid) == 2 && index < many && gpus[index].watched) {
            *event = (Event){&gpus[index].itself, 8, xid, NONE, NONE};
            return OK;
        }
    }
    return TIMEOUT;
}
