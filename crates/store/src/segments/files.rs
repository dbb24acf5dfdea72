//! Segment files that are open for reading: opening one again for every block would look its blocks up anew.

use super::{
    layer::{Layer, LayerFile},
    segment_name,
};
use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Mutex, PoisonError},
};

/// Files that stay open; the one not used for longest is closed.
pub const OPEN_FILES_MAX: usize = 64;

pub(super) struct Files {
    layer: Arc<dyn Layer>,
    /// The most recently used last.
    open: Mutex<VecDeque<(u32, Arc<dyn LayerFile>)>>,
}

impl Files {
    pub(super) fn new(layer: Arc<dyn Layer>) -> Self {
        Self { layer, open: Mutex::default() }
    }

    /// Does something with a segment's file.
    pub(super) fn with<T>(&self, segment: u32, what: impl FnOnce(&dyn LayerFile) -> io::Result<T>) -> io::Result<T> {
        let known = {
            let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
            let at = open.iter().position(|(number, _)| *number == segment);
            at.and_then(|at| open.remove(at)).map(|entry| {
                let file = Arc::clone(&entry.1);
                open.push_back(entry);
                file
            })
        };
        let file = match known {
            Some(file) => file,
            None => self.open(segment)?,
        };
        what(&*file)
    }

    /// Closes a file that is removed, so that its space comes back.
    pub(super) fn forget(&self, segment: u32) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|(number, _)| *number != segment);
    }

    fn open(&self, segment: u32) -> io::Result<Arc<dyn LayerFile>> {
        let file: Arc<dyn LayerFile> = Arc::from(self.layer.open(&segment_name(segment))?);
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        // Two readers may have opened it at the same time; one of them is enough.
        if open.iter().all(|(number, _)| *number != segment) {
            open.push_back((segment, Arc::clone(&file)));
        }
        if open.len() > OPEN_FILES_MAX {
            open.pop_front();
        }
        Ok(file)
    }
}
