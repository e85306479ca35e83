// The log of what a GPU would have done, in the order of the host's calls.
#define _GNU_SOURCE
#include "fake_gpu.h"
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static FILE *file;
static pid_t owner;  // a forked process writes a log of its own
static void (*on_sync)(const char *name);
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void open_log(void) {
    const char *prefix = getenv("FAKE_GPU_LOG");
    owner = getpid();
    file = NULL;
    if (!prefix || !*prefix) return;
    char path[4096];
    snprintf(path, sizeof path, "%s.%d", prefix, (int)owner);
    file = fopen(path, "w");
    if (!file) {
        perror(path);
        abort();
    }
}

int log_is_open(void) {
    pthread_mutex_lock(&mutex);
    if (owner != getpid()) open_log();
    int is_open = file != NULL;
    pthread_mutex_unlock(&mutex);
    return is_open;
}

void log_event(const char *kind, const char *name, size_t bytes, const void *stream) {
    if (log_is_open()) {
        pthread_mutex_lock(&mutex);
        fprintf(file, "%s\t%zu\t%zu\t%s\n", kind, (size_t)(uintptr_t)stream, bytes, name);
        pthread_mutex_unlock(&mutex);
    }
    if (on_sync && strcmp(kind, "sync") == 0) on_sync(name);
}

// Called from Python by ctypes: writes a line with the caller's text, and flushes the log to disk.
void fake_gpu_mark(const char *text) {
    log_event("mark", text, 0, NULL);
    if (file) fflush(file);
}

// Called from Python by ctypes: sets a function to call at each host-device synchronization.
void fake_gpu_on_sync(void (*function)(const char *)) { on_sync = function; }
