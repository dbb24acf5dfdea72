//! Reads a recording line by line, up to its end or to where it was cut.

use anyhow::{Context, Result, bail};
use std::{
    fs::File,
    io::{BufRead, BufReader, Read},
    path::Path,
};
use warmset_planner::recording::{LINE_BYTES_MAX, Line, LineError};

/// How a recording ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ending {
    /// As it should, for this reason.
    Whole(String),
    /// Without its last line, or in the middle of one: whoever wrote it was stopped.
    Cut,
}

/// A recording on its way in.
pub(crate) struct Reading {
    file: BufReader<File>,
    text: Vec<u8>,
    line: u64,
    ending: Option<Ending>,
}

impl Reading {
    /// Opens a file.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Self { file: BufReader::new(file), text: Vec::new(), line: 0, ending: None })
    }

    /// Whether a file begins as recordings do, or is one that was stopped before it began.
    pub(crate) fn is_recording(path: &Path) -> bool {
        let is_empty = path.metadata().is_ok_and(|found| found.len() == 0);
        is_empty || Self::open(path).and_then(|mut reading| reading.next()).is_ok_and(|line| line.is_some())
    }

    /// The next line; none at the end. The last one, which says why it ends, is not handed out.
    pub(crate) fn next(&mut self) -> Result<Option<Line>> {
        if self.ending.is_some() {
            return Ok(None);
        }
        self.line += 1;
        self.text.clear();
        let most = LINE_BYTES_MAX + 1;
        let length = (&mut self.file).take(most).read_until(b'\n', &mut self.text)?;
        if length as u64 == most {
            bail!("line {} is longer than {LINE_BYTES_MAX} bytes: it is no line of a recording", self.line);
        }
        if self.text.pop_if(|byte| *byte == b'\n').is_none() {
            return self.cut();
        }
        match Line::read(self.line, &mut self.text) {
            Ok(Line::End(end)) => {
                self.ending = Some(Ending::Whole(end.reason));
                if self.file.fill_buf()?.is_empty() {
                    return Ok(None);
                }
                bail!("something follows line {}, which says that it is the last one", self.line)
            }
            Ok(line) => Ok(Some(line)),
            Err(LineError::Foreign) if self.line == 1 => bail!("it is no recording of warmset"),
            Err(error) => bail!("line {}: {error}", self.line),
        }
    }

    /// What is left without its line break.
    fn cut(&mut self) -> Result<Option<Line>> {
        if self.line == 1 {
            bail!("it is no recording of warmset: it has no whole line");
        }
        self.ending = Some(Ending::Cut);
        Ok(None)
    }

    /// How it ended, once it has.
    pub(crate) fn ending(&self) -> Option<&Ending> {
        self.ending.as_ref()
    }
}
