//! Chat templates as Hugging Face's transformers renders them, for templates from anybody: bounded work, bounded
//! output, and nothing to reach outside of the template.

mod content;
mod functions;
mod tools;

#[cfg(test)]
mod tests;

use crate::protocol::Tools;
use content::Calls;
use minijinja::{Environment, ErrorKind, Value, context, syntax::SyntaxConfig};
use std::{
    cell::OnceCell,
    io::{self, Write},
};

/// Work one rendering may do: instructions, plus one for every 64 bytes created. Real templates need about a hundred
/// for each message.
pub const FUEL: u64 = 500_000;
/// The longest prompt that a template may render.
pub const OUTPUT_BYTES_MAX: usize = 16 << 20;
/// The longest template that is accepted, as in the header reader.
pub const TEMPLATE_BYTES_MAX: usize = 256 << 10;
/// The most messages of one conversation.
pub const MESSAGES_MAX: usize = 10_000;

/// The format for models that bring no template, which most instruction-tuned models understand.
pub const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] \
                          + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}\
                          {{ '<|im_start|>assistant\n' }}{% endif %}";

const NAME: &str = "chat_template";

/// Why a conversation was not rendered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The template itself cannot be used: the model's fault.
    #[error("the model's chat template is invalid: {0}")]
    Invalid(String),
    /// The template failed or gave up on these messages.
    #[error("the model's chat template failed: {0}")]
    Failed(String),
    /// The template refused these messages in its own words.
    #[error("the model's chat template refuses these messages: {0}")]
    Refused(String),
    /// The template does not come to an end within its limits.
    #[error("the model's chat template does more work than is allowed for one prompt")]
    TooMuchWork,
    /// The prompt is longer than allowed.
    #[error("the prompt rendered by the model's chat template is longer than {OUTPUT_BYTES_MAX} bytes")]
    TooLong,
    /// The messages are not what the API says: the caller's fault.
    #[error("{0}")]
    Messages(String),
}

/// A compiled chat template with the texts of the tokens it may name.
pub struct ChatTemplate {
    environment: Environment<'static>,
    begin_text: String,
    end_text: String,
    takes_parts: OnceCell<bool>,
    /// Whether it renders functions and calls of them as answers write them.
    renders_calls: bool,
}

impl ChatTemplate {
    /// Compiles a template. `begin_text` and `end_text` are the model's begin and end tokens as text, empty for none.
    pub fn new(source: &str, begin_text: &str, end_text: &str) -> Result<Self, TemplateError> {
        if source.len() > TEMPLATE_BYTES_MAX {
            return Err(TemplateError::Invalid(format!("it is longer than {TEMPLATE_BYTES_MAX} bytes")));
        }
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| TemplateError::Invalid(error.to_string()))?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        functions::install(&mut environment);
        environment
            .add_template_owned(NAME, source.to_owned())
            .map_err(|error| TemplateError::Invalid(describe(&error)))?;
        let (begin_text, end_text) = (begin_text.into(), end_text.into());
        let (takes_parts, renders_calls) = (OnceCell::new(), tools::is_native(source));
        Ok(Self { environment, begin_text, end_text, takes_parts, renders_calls })
    }

    /// Renders a conversation, OpenAI's messages as a JSON array, up to where the assistant begins to speak.
    pub fn render(&self, messages: &str) -> Result<String, TemplateError> {
        self.render_with_tools(messages, None)
    }

    /// Renders a conversation in which the model may call functions.
    pub fn render_with_tools(&self, messages: &str, tools: Option<&Tools>) -> Result<String, TemplateError> {
        if self.renders_calls {
            let messages = content::parse(messages, Calls::Values, || self.takes_parts())?;
            return self.render_values(messages, tools::value(tools));
        }
        let instructions = tools::instructions(tools);
        let messages = content::parse(messages, Calls::Text(instructions.as_deref()), || self.takes_parts())?;
        self.render_values(messages, Value::UNDEFINED)
    }

    /// Whether the template goes through the parts of a message by itself, which is tried out once: one that expects
    /// text fails on parts or prints them as they are in memory.
    fn takes_parts(&self) -> bool {
        const WORD: &str = "needle";
        *self.takes_parts.get_or_init(|| {
            let tried = self.render_values(content::one_part(WORD), Value::UNDEFINED);
            tried.is_ok_and(|text| text.contains(WORD) && !text.contains("\"type\"") && !text.contains("'type'"))
        })
    }

    fn render_values(&self, messages: Value, tools: Value) -> Result<String, TemplateError> {
        let template = self.environment.get_template(NAME).map_err(|error| TemplateError::Invalid(describe(&error)))?;
        let context = context! {
            messages => messages,
            tools => tools,
            add_generation_prompt => true,
            bos_token => self.begin_text.as_str(),
            eos_token => self.end_text.as_str(),
        };
        let mut output = Capped { bytes: Vec::new(), full: false };
        let result = template.render_captured_to(context, &mut output).map(|_| ());
        if output.full {
            return Err(TemplateError::TooLong);
        }
        result.map_err(|error| classify(&error))?;
        String::from_utf8(output.bytes).map_err(|error| TemplateError::Failed(error.to_string()))
    }
}

struct Capped {
    bytes: Vec<u8>,
    full: bool,
}

impl Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > OUTPUT_BYTES_MAX {
            self.full = true;
            return Err(io::Error::other("too long"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn classify(error: &minijinja::Error) -> TemplateError {
    if error.kind() == ErrorKind::OutOfFuel {
        return TemplateError::TooMuchWork;
    }
    match functions::refusal(error) {
        Some(words) => TemplateError::Refused(words),
        None => TemplateError::Failed(describe(error)),
    }
}

/// One line: what happened and on which line of the template.
fn describe(error: &minijinja::Error) -> String {
    const WORDS_MAX: usize = 300;
    let mut words = error.kind().to_string();
    if let Some(detail) = error.detail() {
        words = format!("{words}: {detail}");
    }
    if let Some(line) = error.line() {
        words = format!("{words} (line {line})");
    }
    words.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).take(WORDS_MAX).collect()
}

/// A text as a template value.
fn text(text: &str) -> Value {
    Value::from(text)
}
