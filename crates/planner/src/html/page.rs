//! The page around tables and plots.

use super::{colour, plot::PlotError};
use std::fmt::Write as _;

const STYLE: &str = "\
body{font:15px/1.5 system-ui,sans-serif;color:#222;background:#fff;max-width:76rem;margin:2rem auto;padding:0 1rem}\
h1{font-size:1.6rem;margin-bottom:.3rem}h2{font-size:1.2rem;margin:2.2rem 0 .5rem;border-bottom:1px solid #ddd}\
p{margin:.4rem 0}.table{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.85rem}\
th,td{padding:.25rem .5rem;text-align:right;border-bottom:1px solid #eee}td{white-space:nowrap}\
th{border-bottom:1px solid #999;font-weight:600;vertical-align:bottom}th:first-child,td:first-child{text-align:left}\
tr.first td{border-top:1px solid #bbb;font-weight:600}\
figure{margin:1rem 0}figcaption{font-size:.9rem;color:#444;margin-bottom:.2rem}svg{width:100%;height:auto;max-width:56rem}\
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;font-size:.85rem}.legend span::before{content:'';display:inline-block;\
width:.9em;height:.9em;margin-right:.4em;vertical-align:-.1em;border-radius:.15em;background:var(--c)}";

/// A page that is being written.
#[derive(Debug, Clone)]
pub struct Page {
    text: String,
}

impl Page {
    /// Begins one.
    pub fn new(title: &str, lead: &str) -> Self {
        let (title, lead) = (escaped(title), escaped(lead));
        let text = format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n<meta name=\"viewport\" \
             content=\"width=device-width\">\n<title>{title}</title>\n<style>{STYLE}</style></head>\n\
             <body>\n<h1>{title}</h1>\n<p>{lead}</p>\n"
        );
        Self { text }
    }

    /// A part begins.
    pub fn heading(&mut self, title: &str) {
        self.add(format_args!("<h2>{}</h2>\n", escaped(title)));
    }

    /// A paragraph.
    pub fn text(&mut self, text: &str) {
        self.add(format_args!("<p>{}</p>\n", escaped(text)));
    }

    /// A table. Rows that begin a group stand out.
    pub fn table(&mut self, heads: &[&str], rows: &[(bool, Vec<String>)]) {
        self.text.push_str("<div class=\"table\"><table>\n<tr>");
        for head in heads {
            self.add(format_args!("<th>{}</th>", escaped(head)));
        }
        self.text.push_str("</tr>\n");
        for (is_first, cells) in rows {
            self.text.push_str(if *is_first { "<tr class=\"first\">" } else { "<tr>" });
            for cell in cells {
                self.add(format_args!("<td>{}</td>", escaped(cell)));
            }
            self.text.push_str("</tr>\n");
        }
        self.text.push_str("</table></div>\n");
    }

    /// A plot, with what its colours mean.
    pub fn figure(&mut self, caption: &str, svg: Result<String, PlotError>, legend: &[&str]) -> Result<(), PlotError> {
        self.add(format_args!("<figure><figcaption>{}</figcaption>\n", escaped(caption)));
        self.text.push_str(&svg?);
        self.text.push_str("<div class=\"legend\">");
        for (number, name) in legend.iter().enumerate() {
            let (red, green, blue) = colour(number);
            self.add(format_args!("<span style=\"--c:rgb({red},{green},{blue})\">{}</span>", escaped(name)));
        }
        self.text.push_str("</div></figure>\n");
        Ok(())
    }

    /// The whole page.
    pub fn finish(mut self) -> String {
        self.text.push_str("</body></html>\n");
        self.text
    }

    fn add(&mut self, arguments: std::fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = self.text.write_fmt(arguments);
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Seconds with as many digits as say something.
pub fn seconds_text(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 0.1 => format!("{seconds:.3}"),
        seconds if seconds < 10.0 => format!("{seconds:.2}"),
        seconds if seconds < 100.0 => format!("{seconds:.1}"),
        seconds => format!("{seconds:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_into_it_stays_text() {
        let mut page = Page::new("<script>", "a & b");
        page.table(&["<b>"], &[(true, vec!["\"x\"".to_owned()])]);
        let text = page.finish();
        assert!(!text.contains("<script>") && !text.contains("<b>"), "{text}");
        assert!(text.contains("a &amp; b") && text.contains("&quot;x&quot;") && text.ends_with("</html>\n"), "{text}");
    }
}
